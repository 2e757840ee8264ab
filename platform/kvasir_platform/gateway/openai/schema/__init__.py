"""The bodies of the API: what clients may send, and how it is read."""
