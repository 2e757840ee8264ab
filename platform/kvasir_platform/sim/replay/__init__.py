"""Trace replay: recorded traffic over simulated workers in virtual time, decided by the production code."""
