"""KV blocks between workers: adapters of `kvasir.ports.transfer`."""
