"""Programs that run peers on our workloads, in environments of their own."""
