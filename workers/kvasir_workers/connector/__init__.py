"""vLLM's connector: hand-offs between workers, and tiers below the device, behind vLLM's one seam."""
