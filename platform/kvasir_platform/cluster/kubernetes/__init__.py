"""The Kubernetes API server: EndpointSlices, watches and discovery."""
