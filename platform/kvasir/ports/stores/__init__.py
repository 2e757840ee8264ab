"""Ports of what routers write down for longer than they run."""
