"""Pools: engine replicas as Ray Serve deployments."""
