"""Simulated connections and membership."""
