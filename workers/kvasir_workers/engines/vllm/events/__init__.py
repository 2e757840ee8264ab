"""kvasir_workers.engines.vllm.events."""
