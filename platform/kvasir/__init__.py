"""Kvasir's kernel: what the router and the workers share."""
