"""Requests for embeddings: a machine and a fleet of their own, without KV."""
