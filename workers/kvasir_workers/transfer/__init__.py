"""KV transfer between workers: the adapters of `kvasir.ports.transfer`."""
