"""Pool sizing: decides how many replicas each pool should have, and why.

    routers report load ──▶ demand ──▶ forecast ─▶ backtest ─▶ capacity ──▶ sizes ──▶ planner
                                                                                         │
    replicas start, drain, change roles  ◀── scaler  ◀── loop  ◀── victims, flips  ◀─────┘

Everything but `loop` is pure: time is an argument, and no module does I/O.
"""
