"""Simulation: virtual time and simulated components, so that a test of an hour of traffic runs in seconds."""
