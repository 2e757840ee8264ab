"""KV below the device: adapters of `kvasir.ports.tier`, and what moves blocks between them and the engine."""
