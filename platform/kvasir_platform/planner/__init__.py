"""Pools that size themselves: what decides how many replicas each pool should have, and why.

    routers tell what comes in ──▶ demand ──▶ forecast ─▶ caution ─▶ capacity ──▶ sizes ──▶ planner
                                                                                              │
    replicas start, drain, change roles  ◀── scaler  ◀── loop  ◀── victims, flips  ◀──────────┘

Everything but `loop` is pure: time comes in as an argument, and nothing is asked or told.
"""
