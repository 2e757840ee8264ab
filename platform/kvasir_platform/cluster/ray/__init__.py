"""Ray and Ray Serve: heads, nodes, pools, membership and scaling."""
