"""Parts of the bench of KV movement: memory, processes, contenders, and engines."""
