"""Where files and batches are kept, and leases on the work."""
