"""What cells share beside amounts per minute: the concurrency of a tenant, and what it has spent."""
