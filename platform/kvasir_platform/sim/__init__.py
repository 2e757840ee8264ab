"""Simulation: virtual time and simulated parts, so that an hour of traffic is a test of seconds."""
