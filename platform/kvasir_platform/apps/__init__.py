"""Composition roots: the only places that pick adapters and wire them together."""
