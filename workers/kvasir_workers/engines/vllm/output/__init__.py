"""kvasir_workers.engines.vllm.output."""
