"""Routers that run at the same time and are measured in turn, so that drift affects all alike."""
