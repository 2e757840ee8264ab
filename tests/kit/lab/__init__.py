"""A lab of real processes: a fleet on loopback, the faults that can befall it, and what must hold after."""
