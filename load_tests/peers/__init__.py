"""Programs that run peers on our workloads, in their own environments."""
