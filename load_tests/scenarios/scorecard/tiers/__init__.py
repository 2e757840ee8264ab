"""Scorecard rows about faults of KV tiers."""
