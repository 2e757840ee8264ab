"""Scorecard rows about overload, rolling restarts and recovery of a fleet."""
