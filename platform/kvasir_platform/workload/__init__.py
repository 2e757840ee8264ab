"""Workloads: requests with their arrivals, lengths and shared prefixes, read from files or generated."""
