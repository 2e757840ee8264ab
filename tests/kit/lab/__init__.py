"""A lab of real processes: a fleet on loopback, faults to inject, and invariants to check afterwards."""
