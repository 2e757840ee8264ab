"""The request machine, without I/O: state, events, placement, progress, failover, completion."""
