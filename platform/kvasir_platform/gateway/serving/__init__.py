"""The pipeline of one request, from a decoded body to its answer."""
