"""Edge processes and the core that they share: HTTP on many cores, and one index."""
