"""KV tiers below the device: adapters of `kvasir.ports.tier`, and the copies between them and the engine."""
