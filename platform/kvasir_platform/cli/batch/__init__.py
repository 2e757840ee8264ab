"""`kvasir batch`: batches of a running deployment."""
