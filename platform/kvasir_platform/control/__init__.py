"""Control: membership, pools and what runs them (Ray, Kubernetes)."""
