"""Checks before a start: what would keep a deployment from running, found in seconds."""
