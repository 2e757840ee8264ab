"""Engines in virtual time: batches of sequences whose steps take what the performance model says."""
