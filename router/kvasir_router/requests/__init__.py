"""The request machine, without I/O: states and events, placement, progress, failover, completion."""
