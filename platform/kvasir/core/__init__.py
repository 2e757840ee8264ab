"""Pure types, errors and rules: no I/O, no clock, no randomness."""
