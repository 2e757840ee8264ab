"""Routes: what clients may send as `model`, and which model answers."""
