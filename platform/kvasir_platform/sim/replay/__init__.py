"""Trace replay: recorded traffic on simulated workers in virtual time, decided by the production code."""
