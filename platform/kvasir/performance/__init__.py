"""The performance model of an engine: how long a step takes, and which resource limits it.

One model answers what the router expects of a worker, what the planner and `kvasir plan` size, and what the
simulator runs; `kvasir calibrate` fits its coefficients to measurements. It is pure, and it counts work from
config.json as `kvasir.sizing` counts memory.
"""
