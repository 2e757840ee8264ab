"""KV blocks between workers: adapters of `kvasir.ports.transfer`, and the vLLM connector on top of them."""
