"""A simulated engine: the scheduling, memory and timing of a real one, without its arithmetic.

It serves load tests, fault tests and the planner, where what matters is when tokens come and what
blocks are held, and a real model would only make runs slow and unrepeatable.
"""
