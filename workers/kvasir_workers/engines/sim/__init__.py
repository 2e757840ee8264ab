"""A simulated engine: the scheduling, memory and timing of a real one, without its arithmetic.

It serves load tests, fault tests and the planner, which need the timing of tokens and the contents of caches,
and for which a real model would make runs slow and not reproducible.
"""
