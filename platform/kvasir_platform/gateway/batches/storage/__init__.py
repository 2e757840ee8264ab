"""Where files, batches and the results of lines are kept, and leases on the work."""
