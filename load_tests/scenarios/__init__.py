"""Benchmark scenarios, one module or package each."""
