"""What parts of a worker report of their use."""
