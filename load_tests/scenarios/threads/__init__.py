"""How an engine's OpenMP threads wait between steps, and what that does to streams of others on the same
CPUs."""
