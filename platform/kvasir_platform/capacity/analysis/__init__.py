"""What there is to say of plans: memory, error bars, arithmetic, which hardware and which optimisation."""
