"""vLLM's KV connector: hand-offs between workers, and tiers below the device."""
