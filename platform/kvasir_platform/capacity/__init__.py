"""What to run for a load: GPUs, layout, pools, replicas, cost. It is pure; the command `kvasir plan` reads.

It asks the performance model (`kvasir.performance`) for the time of steps and `kvasir.sizing` for memory,
puts a queue in front of the engines, and searches the least cost at which the SLO is met.
"""
