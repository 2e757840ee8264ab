"""What runs a deployment: Ray, Kubernetes, local processes, checks before the start, certificates."""
