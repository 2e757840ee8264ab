"""Checks before a start: finds in seconds what would prevent a deployment from running."""
