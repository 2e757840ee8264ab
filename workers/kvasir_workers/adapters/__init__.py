"""LoRA adapters that a worker loads and unloads while it serves: where they come from, and which it holds."""
