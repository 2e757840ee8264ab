"""What is kept of each decision: why a request ran where it ran, and what came of it."""
