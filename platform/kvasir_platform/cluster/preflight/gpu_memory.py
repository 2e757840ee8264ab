"""Chooses GPUs and memory where the spec leaves them open, and checks whether the model of each pool fits on
its GPUs, with the arithmetic, and whether they compute in its dtype. The GPUs may be those of other machines,
as before an installation in a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvasir.config.load.gpu_choice import with_chosen_gpus
from kvasir.config.load.model_support import served_length
from kvasir.config.load.support import Platform, engine_platform
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.hardware.gpus import Gpu, gpu_named, gpu_of_device
from kvasir.sizing.drafts import Draft, draft_model, medusa_heads, prediction_layers
from kvasir.sizing.fit import ModelFiles, Need, fit, need_of
from kvasir.sizing.pools import rank_memory, shape_of
from kvasir.sizing.remedies import Attempt, fitting_gpus, remedies
from kvasir.sizing.report import GIB, describe, gib, terms
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.machine_facts import KnownModels, MachineFacts, ModelProbe
from kvasir_platform.cluster.preflight.model import content_findings
from kvasir_platform.cluster.preflight.movement import movement_findings, whole_where_needed

_UNIT = 64 << 20
_BFLOAT16 = (8, 0)
"""The least compute capability with bfloat16; vLLM refuses it below."""


def machine_platform(machine: MachineFacts) -> Platform:
    """Return the platform of the engine that is installed, or would be."""
    return engine_platform(machine.installed) or ("cuda" if machine.gpus else "cpu")


def with_gpus(deployment: Deployment, machine: MachineFacts) -> tuple[Deployment, list[Finding]]:
    """Return the deployment as this machine runs its pools, with numbers of GPUs, and with sizes of the KV
    caches of those that share one; and what was chosen. Unchanged if the pools run elsewhere."""
    if deployment.discovery.kind != "ray":
        return deployment, []
    choice = with_chosen_gpus(deployment, present=machine.gpus, platform=machine_platform(machine))
    if choice.missing:
        remedy = "run where the GPUs are, or install vLLM's build for CPUs: `make install EXTRA=cpu`"
        return deployment, [Finding("gpus", "error", choice.missing, remedy)]
    chosen = [Finding("gpus", "ok", choice.reason)] if choice.reason else []
    return _with_divided_memory(choice.deployment, machine, lambda _: machine.gpu_devices), chosen


def _with_divided_memory(
    deployment: Deployment, models: KnownModels, devices: Callable[[PoolSpec], Sequence[str]]
) -> Deployment:
    """vLLM takes what other processes allocate while it profiles for its own: engines that share a GPU of
    this machine get the size of their KV from the arithmetic."""
    if deployment.discovery.kind != "ray":
        return deployment
    sizes = {
        pool.name: _part_for_kv(view, pool, models, devices(pool))
        for view in deployment.views()
        for pool in view.pools
        if 0 < pool.reserved_gpus < 1 and pool.engine.kind == "vllm" and pool.engine.kv_cache_bytes is None
    }
    pools = tuple(
        pool.model_copy(update={"engine": pool.engine.model_copy(update={"kv_cache_bytes": size})})
        if (size := sizes.get(pool.name)) is not None
        else pool
        for pool in deployment.pools
    )
    return deployment.model_copy(update={"pools": pools}) if sizes else deployment


def _part_for_kv(view: Deployment, pool: PoolSpec, models: KnownModels, devices: Sequence[str]) -> int | None:
    """Return the KV bytes of a rank in its part of the GPU. None if they are unknown, or the model does not
    fit."""
    gpu, model = _gpu(pool, devices), models.model_of(view)
    length = None if model.config is None else served_length(view, model.config)
    if gpu is None or model.config is None or length is None or not model.weights:
        return None
    draft, _ = _draft(pool, model, models.draft_of(pool))
    files = ModelFiles(model.config, model.weights, draft)
    need = need_of(files, shape_of(view, pool, max_model_len=length))
    found = fit(need, rank_memory(pool, gpu.memory_bytes))
    size = found.free // _UNIT * _UNIT
    return None if found.missing or size < found.request else size


def gpu_memory_findings(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    """Yield one finding for each pool on GPUs whose model's files are here."""
    for view in deployment.views():
        for pool in view.pools:
            if pool.reserved_gpus and pool.engine.kind == "vllm":
                draft = machine.draft_of(pool)
                yield from pool_findings(view, pool, machine.model_of(view), machine.gpu_devices, draft)


def fit_findings(
    deployment: Deployment, models: KnownModels, devices: Callable[[PoolSpec], Sequence[str]]
) -> list[Finding]:
    """Return what keeps the models of pools on GPUs from being served, and whether each fits on `devices` of
    its pool: the findings of a check on a machine with these, and nothing of any other property. What cannot
    be known is a warning."""
    deployment, findings = whole_where_needed(deployment, models)
    deployment = _with_divided_memory(deployment, models, devices)
    for view in deployment.views():
        pools = [pool for pool in view.pools if pool.reserved_gpus and pool.engine.kind == "vllm"]
        if pools:
            model = models.model_of(view)
            findings += _of_model(view, model)
            for pool in pools:
                findings += pool_findings(view, pool, model, devices(pool), models.draft_of(pool))
    return findings


def _of_model(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    """Yield why it cannot be served, or why it is not known whether it fits."""
    unknown = model.unknown
    if not unknown:
        yield from content_findings(view, model)
        yield from movement_findings(view, model)
        if model.config is not None and not model.weights:
            unknown = model.weights_problem or "the headers of its weights could not be read"
    if unknown:
        yield Finding("memory", "warning", f"whether {view.model.name} fits is not known: {unknown}")


def pool_findings(
    view: Deployment, pool: PoolSpec, model: ModelProbe, devices: Sequence[str], draft: ModelProbe | None
) -> Iterator[Finding]:
    """Yield whether `model` fits on the GPU that `pool` names, on the smallest of `devices` if it names none,
    or what it needs if neither is known, together with the `draft` that the pool names."""
    length = None if model.config is None else served_length(view, model.config)
    gpu = _gpu(pool, devices)
    if gpu is not None and gpu.capability < _BFLOAT16 and view.model.dtype == "bfloat16":
        message = f"pool {pool.name}: model.dtype is bfloat16, which {gpu.name} does not compute"
        yield Finding("engine", "error", message, "set model.dtype to float16, or to auto")
    if model.config is None or length is None or not model.weights:
        return
    proposes, unknown = _draft(pool, model, draft)
    if unknown:
        what = f"pool {pool.name}: what {unknown} adds is not counted"
        yield Finding("memory", "warning", what, "it takes its memory of what is left for KV")
    files = ModelFiles(model.config, model.weights, proposes)
    shape = shape_of(view, pool, max_model_len=length)
    need = need_of(files, shape)
    if gpu is None:
        yield _unknown(view, pool, need, devices)
        return
    memory = rank_memory(pool, gpu.memory_bytes)
    found = fit(need, memory)
    each = gpu.name if shape.ranks == 1 else f"each of {shape.ranks} {gpu.name}"
    message = f"pool {pool.name}: {view.model.name} {describe(found, need, each)}"
    if found.missing:
        changes = remedies(Attempt(files, shape, memory, gpu, pool.reserved_gpus, pool.engine.nodes))
        yield Finding("memory", "error", message, "; or ".join(changes) or "take a smaller model")
    elif pool.gpu_utilization < pool.engine.gpu_memory_utilization and memory.kv_bytes is None:
        # vLLM takes what other processes allocate while it profiles for its own.
        size = found.free // _UNIT * _UNIT
        remedy = (
            f"set engine.kv_cache_bytes: {size}, since engines that start together on one GPU mismeasure it"
        )
        yield Finding("memory", "warning", message, remedy)
    else:
        yield Finding("memory", "ok", message)


def _draft(pool: PoolSpec, model: ModelProbe, probe: ModelProbe | None) -> tuple[Draft | None, str]:
    """Return what proposes the pool's tokens beside `model`, and its name and why it is not known, "" if it
    is, or if nothing does."""
    spec = pool.engine.speculative
    if spec is None or spec.method == "ngram":
        return None, ""
    own = probe is None and spec.method == "mtp" and spec.model is None
    found = model if own else probe or ModelProbe(unknown="its files were not examined")
    name = spec.model or "the prediction layers of the model"
    held = found.predictors if spec.method in ("mtp", "medusa") else found.weights
    if found.config is None or not held:
        why = found.problem or found.unknown or found.weights_problem or "its weights could not be read"
        return None, f"{name} ({why})"
    if spec.method == "medusa":
        return medusa_heads(found.config, held), ""
    if spec.method == "mtp":
        return prediction_layers(found.config, held), ""
    return draft_model(found.config, held), ""


def _gpu(pool: PoolSpec, devices: Sequence[str]) -> Gpu | None:
    if pool.gpu is not None:
        return gpu_named(pool.gpu)
    known = [gpu_of_device(device) for device in devices]
    found = [gpu for gpu in known if gpu is not None]
    return min(found, key=lambda gpu: gpu.memory_bytes) if found and len(found) == len(known) else None


def _unknown(view: Deployment, pool: PoolSpec, need: Need, devices: Sequence[str]) -> Finding:
    weights, adapters, drafts = max(need.weights), max(need.adapters), max(need.drafts)
    request = max(need.kv.request_bytes)
    total = gib(weights + adapters + drafts + need.working.total + request)
    spent = terms(weights, adapters, drafts, need)
    message = (
        f"pool {pool.name}: {view.model.name} needs {total} GiB of each GPU: {spent} + "
        f"{request / GIB:.2f} KV for one request of {need.kv.max_model_len:,} tokens"
    )
    if names := fitting_gpus(need, rank_memory(pool, 0)):
        message += f"; the smallest that have it: {', '.join(names)}"
    unknown = ", ".join(sorted({device for device in devices if device})) or "the pool's GPU"
    remedy = f"{unknown} is not known here: name one of the catalogue in pools.{pool.name}.gpu to compare"
    return Finding("memory", "warning", message, remedy)
