"""Starts of engines whose weights are not on a local disk: a network volume, and object storage."""
