"""vLLM's KV events, and the record of its prefix cache that they keep exact."""
