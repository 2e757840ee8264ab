"""kvasir_workers.engines.vllm.runtime.engine_runtime."""
