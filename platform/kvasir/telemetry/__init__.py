"""Metrics, spans, logs, and the closed vocabulary of outcomes."""
