"""Sessions with workers: connections, membership, snapshots and liveness."""
