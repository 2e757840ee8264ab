"""Simulated clusters under faults, in virtual time. Each history replays from its seed:

python -m kvasir_platform.sim.chaos --seed 7 --verbose
"""
