"""What the bench of KV movement consists of: memory, processes, those that move, and engines."""
