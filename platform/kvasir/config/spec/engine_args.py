"""`engine.args`: arguments of vLLM for which the spec has no field.

Names and types are vLLM's. Arguments that follow from other fields are refused with the field to use, because
the router, the other workers and the chart read that field and would disagree with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ConfigDict, WithJsonSchema
from typing_extensions import TypedDict

from kvasir.config.checks.vllm_args import VllmArgs

OWNED: Mapping[str, str] = {
    "model": "set model.source",
    "model_weights": "set model.source",
    "served_model_name": "set model.served_name",
    "tokenizer": "set model.source: router and workers use the tokenizer of its folder",
    "tokenizer_mode": "set model.source: router and workers use the tokenizer.json of its folder",
    "skip_tokenizer_init": "leave it out: workers detokenize",
    "revision": "set model.revision",
    "tokenizer_revision": "set model.revision",
    "code_revision": "set model.revision",
    "hf_token": "set the environment variable HF_TOKEN, or modelCache.tokenSecret of the chart",
    "generation_config": "set model.generation_config: the gateway applies it",
    "override_generation_config": "set model.generation_config: the gateway applies it",
    "trust_remote_code": "set model.trust_remote_code",
    "runner": "set the role of the pool: embed, or one of the others",
    "convert": "set the role of the pool: embed, or one of the others",
    "tokens_only": "leave it out: workers detokenize",
    "safetensors_load_strategy": "set model.load.strategy",
    "safetensors_prefetch_num_threads": "set model.load.threads",
    "dtype": "set model.dtype",
    "quantization": "set model.quantization",
    "allow_deprecated_quantization": "set model.quantization",
    "max_model_len": "set model.max_model_len",
    "seed": "set engine.seed",
    "block_size": "set engine.block_size",
    "kv_cache_dtype": "set engine.kv_dtype",
    "kv_cache_memory_bytes": "set engine.kv_cache_bytes",
    "gpu_memory_utilization": "set engine.gpu_memory_utilization",
    "num_gpu_blocks_override": "set engine.kv_cache_bytes",
    "enable_prefix_caching": "set engine.prefix_caching",
    "prefix_caching_hash_algo": "leave it out: tiers need a hash that holds outside the engine",
    "enable_chunked_prefill": "set engine.chunked_prefill",
    "max_num_seqs": "set engine.max_num_seqs",
    "max_num_batched_tokens": "set engine.max_num_batched_tokens",
    "max_num_queued_reqs": "set routing.max_queue: the router admits requests",
    "max_num_queued_tokens": "set admission.max_queue_tokens: the router admits requests",
    "scheduling_policy": "set tenancy.priorities: the router gives each request its priority",
    "tensor_parallel_size": "set engine.tensor_parallel_size",
    "pipeline_parallel_size": "set engine.pipeline_parallel_size",
    "data_parallel_size": "set engine.data_parallel_size",
    "data_parallel_rank": "set engine.data_parallel_size",
    "data_parallel_start_rank": "set engine.data_parallel_size",
    "data_parallel_size_local": "set engine.data_parallel_size",
    "data_parallel_address": "set engine.data_parallel_size",
    "data_parallel_rpc_port": "set engine.data_parallel_size",
    "data_parallel_backend": "set engine.data_parallel_size",
    "data_parallel_hybrid_lb": "set engine.data_parallel_size: the router balances load",
    "data_parallel_external_lb": "set engine.data_parallel_size: the router balances load",
    "data_parallel_multi_port_external_lb": "set engine.data_parallel_size: the router balances load",
    "prefill_context_parallel_size": "set engine.tensor_parallel_size",
    "enable_expert_parallel": "set engine.expert_parallel",
    "all2all_backend": "set engine.all2all_backend",
    "enable_eplb": "set engine.eplb",
    "eplb_config": "set engine.eplb",
    "enable_dbo": "set engine.dual_batch_overlap",
    "enable_elastic_ep": "leave it out: an engine keeps its number of ranks",
    "elastic_ep_max_dp_size": "leave it out: an engine keeps its number of ranks",
    "distributed_executor_backend": "set engine.nodes",
    "nnodes": "set engine.nodes",
    "node_rank": "set engine.nodes",
    "master_addr": "set engine.nodes",
    "master_port": "set engine.nodes",
    "worker_extension_cls": "leave it out: Kvasir has one of its own",
    "structured_outputs_config": "set engine.structured_outputs or engine.compact_json",
    "reasoning_parser": "set engine.reasoning_parser",
    "reasoning_parser_plugin": "set engine.reasoning_parser",
    "enable_lora": "list the adapters in lora, or set lora_loading.allow",
    "max_loras": "list the adapters in lora, or set lora_loading.max_adapters",
    "max_lora_rank": "set rank of the adapters in lora, or lora_loading.max_rank",
    "speculative_config": "set engine.speculative",
    "spec_method": "set engine.speculative",
    "spec_model": "set engine.speculative",
    "spec_tokens": "set engine.speculative",
    "disable_hybrid_kv_cache_manager": "leave it out: it follows from whether KV is moved",
    "kv_transfer_config": "set disaggregation, transfer or tiers",
    "kv_events_config": "set engine.kv_events",
    "kv_offloading_size": "set tiers.cpu",
    "kv_offloading_backend": "set tiers.cpu",
    "disable_log_stats": "leave it out: Kvasir exports the engine's load as metrics of its own",
    "enable_log_requests": "set telemetry.log_level",
    "log_level": "set telemetry.log_level",
    "otlp_traces_endpoint": "set telemetry.otlp_endpoint",
}
"""Arguments that `engine.args` cannot set, with what to do instead."""

KV_LAYOUT = (
    "cp_kv_cache_interleave_size",
    "dcp_kv_cache_interleave_size",
    "decode_context_parallel_size",
    "disable_sliding_window",
    "hf_overrides",
    "kv_cache_dtype_skip_layers",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
)
"""Arguments that change what a KV block holds: equal for pools that exchange KV."""


def _refuse(remedy: str) -> Callable[[object], object]:
    def refuse(_: object) -> object:
        raise ValueError(f"nothing, since Kvasir sets this argument itself; {remedy}")

    return refuse


def _types() -> dict[str, Any]:
    """Return the type of each argument; those in OWNED accept nothing."""
    kinds: dict[str, Any] = get_type_hints(VllmArgs)
    for name, remedy in OWNED.items():
        shown = {"not": {}, "description": f"Not accepted here: {remedy}."}
        kinds[name] = Annotated[Any, BeforeValidator(_refuse(remedy)), WithJsonSchema(shown)]
    return kinds


if TYPE_CHECKING:
    EngineArgs = dict[str, Any]
else:
    EngineArgs = TypedDict("EngineArgs", _types(), total=False)
    EngineArgs.__doc__ = "Fields of vLLM's AsyncEngineArgs."
    EngineArgs.__pydantic_config__ = ConfigDict(extra="forbid")
