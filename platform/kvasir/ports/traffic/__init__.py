"""Ports of what decides where requests go between models."""
