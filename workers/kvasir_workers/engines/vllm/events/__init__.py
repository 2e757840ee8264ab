"""vLLM's KV events, and the exact record of its prefix cache built from them."""
