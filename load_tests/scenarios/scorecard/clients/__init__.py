"""Scorecard rows about slow, disconnecting and malicious HTTP clients."""
