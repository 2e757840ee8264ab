"""Virtual time, simulated processes and their faults."""
