"""Translates the deployment spec into vLLM's arguments and environment. Pure, and without vLLM.

Of vLLM's hundreds of options, the ones set here are those that Kvasir decides, so that an engine's
configuration can be read, tested and shown without starting it. `engine.args` of the spec adds others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.checkpoint.kv_movement import KvMovement
from kvasir.config.checks.quantization import ENGINE_METHODS
from kvasir.config.load.object_storage import is_object_uri, streams_weights
from kvasir.config.load.support import adapter_slots
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SpeculativeSpec
from kvasir.config.spec.media.served import limits_of
from kvasir.core.media.prompts import MediaKind
from kvasir.core.requests import Role
from kvasir.sizing.host import SMALL_KV_BYTES
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.caches.compiled import compiles

CONNECTOR = "KvasirConnector"
CONNECTOR_MODULE = "kvasir_workers.connector.connector"
EXTENSION = "kvasir_workers.engines.vllm.runtime.worker_extension.EngineExtension"
CORE_GRAMMARS = "kvasir_workers.engines.vllm.output.core_grammars"
SALTED_BLOCKS = "kvasir_workers.engines.vllm.events.salted_blocks"
CUT_OFF = "kvasir_cut_off"
"""Key in vLLM's `additional_config`: structured outputs are cut off at `max_tokens`, not completed."""
TRANSFER_EXTENSION = "kvasir_workers.engines.vllm.runtime.transfer_extension.TransferEngineExtension"

EVENT_BACKLOG = 8192
"""KV event messages that a rank keeps for replay, and that may wait on either side."""

_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_OTHER_LOADER = {"load_format", "model_loader_extra_config"}
"""Arguments in `engine.args` that select another loader of vLLM, to which `model.load` does not apply."""
_LOG_LEVELS = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Endpoints at which the ranks of one engine publish and replay their KV events: Unix sockets in a
    private directory of the worker, since events contain every token of every prompt.

    vLLM gives each rank but the first an endpoint of its own only if the name contains `inproc` or `tcp`, and
    binds only those that begin with `ipc://`.
    """

    directory: Path

    @property
    def events(self) -> str:
        """The first rank's publisher."""
        return f"ipc://{self.directory}/inproc-events"

    @property
    def replay(self) -> str:
        """The first rank's replay endpoint."""
        return f"ipc://{self.directory}/inproc-replay"

    def of_rank(self, rank: int) -> tuple[str, str]:
        """Return `events` and `replay` of a data-parallel rank."""
        suffix = f"_dp{rank}" if rank else ""
        return self.events + suffix, self.replay + suffix


def log_level(deployment: Deployment) -> str:
    """Return the level of vLLM's logs."""
    return _LOG_LEVELS[deployment.telemetry.log_level]


def compilers(engine: EngineSpec) -> tuple[str, ...]:
    """Return the compilers of output rules, in order of preference."""
    return ("xgrammar", "guidance") if engine.structured_outputs == "auto" else (engine.structured_outputs,)


def threads_per_rank(deployment: Deployment, pool: PoolSpec, *, cpus: int) -> int:
    """Return the CPU threads of each rank: the spec's, or an equal share of `cpus` among all replicas."""
    if pool.engine.threads is not None:
        return pool.engine.threads
    sharing = sum(each.engine.ranks * each.most for each in deployment.pools if each.engine.kind == "vllm")
    return max(1, cpus // max(1, sharing, pool.engine.ranks))


def engine_arguments(
    deployment: Deployment,
    pool: PoolSpec,
    *,
    model_path: str,
    platform: str,
    movement: KvMovement | None = None,
    events: EventEndpoints | None = None,
    place: NodePlace | None = None,
    media: Collection[MediaKind] = (),
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's AsyncEngineArgs, except that `structured_outputs_config`,
    `kv_transfer_config` and `kv_events_config` are dicts of keyword arguments of StructuredOutputsConfig,
    KVTransferConfig and KVEventsConfig, as are other configurations in `engine.args`; the last two are absent
    if KV is neither transferred nor tiered, or without `events`.

    `model_path` is the folder to load (already quantized if the spec requires it), as is the draft's in
    `pool`; `platform` is cpu or cuda; `movement` is how the model's KV is moved, None if it is not; `place`
    is this process's place among the nodes of its engine, if it has several.
    """
    engine = pool.engine
    arguments: dict[str, Any] = {
        "model": model_path,
        "served_model_name": deployment.model.name,
        "dtype": deployment.model.dtype,
        "trust_remote_code": deployment.model.trust_remote_code,
        **_quantization(deployment),
        **_loading(deployment, engine),
        "max_model_len": deployment.model.context_length,
        "seed": engine.seed,
        "block_size": engine.block_size,
        **_memory(pool, platform),
        **_parallelism(engine, place),
        **_lora(deployment),
        "kv_cache_dtype": engine.kv_dtype,
        "enable_prefix_caching": engine.prefix_caching,
        "enable_chunked_prefill": engine.chunked_prefill,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        # Compilation adds 25 s to every start on a CPU, without a gain for the models that run there.
        "enforce_eager": platform == "cpu",
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "worker_extension_cls": TRANSFER_EXTENSION if deployment.disaggregated else EXTENSION,
        "structured_outputs_config": {
            "backend": compilers(engine)[0],
            "disable_any_whitespace": engine.compact_json,
            "reasoning_parser_plugin": SALTED_BLOCKS if deployment.tenancy.shared_prefixes else CORE_GRAMMARS,
        },
    }
    if engine.reasoning_parser is not None:
        arguments["reasoning_parser"] = engine.reasoning_parser
    if engine.speculative is not None:
        arguments["speculative_config"] = _speculation(engine.speculative)
    if deployment.tiers.configured:
        # Block hashes are used outside this process too. This one costs several times vLLM's default.
        arguments["prefix_caching_hash_algo"] = "sha256_cbor"
    if deployment.moves_kv:
        arguments["kv_transfer_config"] = _connector(deployment, pool, platform)
        if movement is not None and movement.widened:
            # The connector moves blocks of one group of layers.
            arguments["disable_hybrid_kv_cache_manager"] = True
    if events is not None:
        arguments["kv_events_config"] = _events(events)
    if media:
        arguments |= _media(deployment, media)
    arguments |= engine.args
    if not engine.complete_outputs:
        arguments["additional_config"] = {**arguments.get("additional_config", {}), CUT_OFF: True}
    return arguments


def environment(
    deployment: Deployment, pool: PoolSpec, *, cpus: int, platform: str, place: NodePlace | None = None
) -> dict[str, str]:
    """Return the variables to set before vLLM is imported; `cpus` is the number of usable CPUs, and `place`
    is as in `engine_arguments`."""
    variables = {
        # The core process then also is the worker: one process less, and it idles at 0.02 core.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": log_level(deployment),
        # One engine step is handled in one event loop iteration, so that it becomes one message.
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(max(128, 2 * pool.engine.max_num_seqs)),
        # The address where the ranks of one replica connect: local while they are on one node.
        "VLLM_HOST_IP": "127.0.0.1" if place is None else place.address,
        "HF_HUB_OFFLINE": "1",
        "VLLM_MAX_IMAGE_PIXELS": str(deployment.gateway.image_inputs.max_pixels),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if platform == "cpu":
        # Bound threads of several replicas would share the same cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if not compiles(pool, "cpu"):
            # Otherwise the first request for logprobs stops every stream for 3 s while a compiler runs.
            variables["TORCH_COMPILE_DISABLE"] = "1"
        # Threads of OpenMP would spin between steps, and keep everything else on the machine from its CPUs.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
        variables["OMP_NUM_THREADS"] = str(threads_per_rank(deployment, pool, cpus=cpus))
    return variables


def _quantization(deployment: Deployment) -> dict[str, Any]:
    method = deployment.model.quantization
    return {"quantization": method} if method in ENGINE_METHODS else {}


def _loading(deployment: Deployment, engine: EngineSpec) -> dict[str, Any]:
    model, load = deployment.model, deployment.model.load
    found: dict[str, Any] = {"model_weights": model.source} if is_object_uri(model.source) else {}
    if not _OTHER_LOADER.isdisjoint(engine.args):
        return found
    if streams_weights(model):
        streams = {"concurrency": load.threads}
        return found | {"load_format": "runai_streamer", "model_loader_extra_config": streams}
    found["safetensors_prefetch_num_threads"] = load.threads
    if load.format != "auto":
        found["load_format"] = load.format
    if load.strategy != "auto":
        found["safetensors_load_strategy"] = load.strategy
    return found


def _memory(pool: PoolSpec, platform: str) -> dict[str, Any]:
    size = pool.engine.kv_cache_bytes
    if platform == "cpu":
        # Without a size, vLLM would take most of the machine's memory.
        return {"kv_cache_memory_bytes": SMALL_KV_BYTES if size is None else size}
    # vLLM measures what weights and activations leave of the fraction, unless it is given a size.
    return {"gpu_memory_utilization": pool.gpu_utilization, "kv_cache_memory_bytes": size}


def _parallelism(engine: EngineSpec, place: NodePlace | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "enable_expert_parallel": engine.expert_parallel,
        **_experts(engine),
    }
    # Inside a placement group vLLM would choose Ray, and Ray's actors here are one for each node.
    if engine.ranks > engine.data_parallel_size or engine.nodes > 1:
        found["distributed_executor_backend"] = "mp"
    if place is not None:
        found |= {
            "nnodes": engine.nodes,
            "node_rank": place.rank,
            "master_addr": place.leader,
            "master_port": place.port,
        }
        if engine.data_parallel_size > 1:
            # One front, on the leader, has the ranks of all nodes: routers choose the rank of a request.
            found |= {"data_parallel_address": place.leader, "data_parallel_rpc_port": place.rpc_port}
    return found


def _experts(engine: EngineSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if engine.all2all_backend is not None:
        found["all2all_backend"] = engine.all2all_backend
    if (eplb := engine.eplb) is not None:
        found["enable_eplb"] = True
        found["eplb_config"] = {
            "num_redundant_experts": eplb.redundant_experts,
            "window_size": eplb.window_steps,
            "step_interval": eplb.interval_steps,
        }
    if engine.dual_batch_overlap:
        found["enable_dbo"] = True
    return found


def _lora(deployment: Deployment) -> dict[str, Any]:
    slots = adapter_slots(deployment)
    if slots is None:
        return {}
    return {"enable_lora": True, "max_loras": slots.count, "max_lora_rank": slots.rank}


def _media(deployment: Deployment, media: Collection[MediaKind]) -> dict[str, Any]:
    gateway = deployment.gateway
    counts = {kind.value: limits_of(gateway, kind).most if kind in media else 0 for kind in MediaKind}
    videos = {"count": counts["video"], "num_frames": gateway.video_inputs.frames}
    return {
        "limit_mm_per_prompt": counts | ({"video": videos} if counts["video"] else {}),
        # vLLM's front and core each have a copy of the cache of processed media, which agree only if every
        # processed request reaches the core, and in order. Here a leg can end before it does.
        "mm_processor_cache_gb": 0,
    }


def _events(events: EventEndpoints) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.events,
        "replay_endpoint": events.replay,
        "buffer_steps": EVENT_BACKLOG,
        "hwm": EVENT_BACKLOG,
        "max_queue_size": EVENT_BACKLOG,
    }


def _speculation(spec: SpeculativeSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"method": spec.method, "num_speculative_tokens": spec.tokens}
    if spec.method == "ngram":
        found |= {"prompt_lookup_max": spec.lookup_max, "prompt_lookup_min": spec.lookup_min}
    if spec.model is not None:
        found["model"] = spec.model
    if spec.schedule:
        # vLLM's ranges include both ends, and the last one holds for all larger batches.
        ends = [step.batch - 1 for step in spec.schedule[1:]] + [spec.schedule[-1].batch]
        found["num_speculative_tokens_per_batch_size"] = [
            (step.batch, end, step.tokens) for step, end in zip(spec.schedule, ends, strict=True)
        ]
    return found


def _connector(deployment: Deployment, pool: PoolSpec, platform: str) -> dict[str, Any]:
    transfer, tiers = deployment.transfer, deployment.tiers
    settings: dict[str, Any] = {}
    if deployment.disaggregated:
        settings |= {
            "transfer": transfer.kind,
            "host": transfer.host,
            "ucx_tcp": transfer.nixl.unauthenticated_tcp,
            "overlap": transfer.overlap == "always" or (transfer.overlap == "auto" and platform != "cpu"),
            "checksum_parts": _parts(deployment, pool) if transfer.checksum else 0,
            "head_major": len({each.engine.tensor_parallel_size for each in deployment.pools}) > 1,
            "stages": _stages(deployment),
            "lease_s": transfer.lease_s,
            "timeout_s": transfer.stall_timeout_s,
        }
    if tiers.configured:
        settings |= {
            "tiers": tiers.model_dump(mode="json"),
            "model": deployment.model.name,
            "revision": deployment.model.revision,
            "adapters": {each.name: each.path for each in deployment.lora},
        }
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": _KV_ROLES[_part(deployment, pool)] if deployment.disaggregated else "kv_both",
        "kv_load_failure_policy": transfer.on_failure,
        "kv_connector_extra_config": settings,
    }


def _part(deployment: Deployment, pool: PoolSpec) -> Role:
    """Return the roles that an engine must support: both, if the planner may lend it to another pool."""
    return pool.role if deployment.partner(pool.name) is None else Role.BOTH


def _parts(deployment: Deployment, pool: PoolSpec) -> int:
    """Return in how many parts other pools' ranks read a block of one rank of `pool`."""
    mine = pool.engine.tensor_parallel_size
    return max(1, *(each.engine.tensor_parallel_size // mine for each in deployment.pools))


def _stages(deployment: Deployment) -> list[int]:
    """Return the numbers of pipeline stages of the pools, [] if all have as many."""
    found = sorted({each.engine.pipeline_parallel_size for each in deployment.pools})
    return found if len(found) > 1 else []
