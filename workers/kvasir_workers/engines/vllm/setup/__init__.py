"""kvasir_workers.engines.vllm.setup."""
