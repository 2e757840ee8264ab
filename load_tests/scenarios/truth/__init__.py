"""Predictions of the performance model against loads of real engines."""
