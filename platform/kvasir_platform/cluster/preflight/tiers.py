"""Checks whether the storage that a deployment names can be used from here: of tiers, and of batches.

A failed tier stops no request: requests are served without it. So a finding is a warning, except for a folder
that cannot be created. A router starts without an S3 server that does not answer, but not without its bucket.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvasir.config.spec.deployment import Deployment, TiersSpec
from kvasir.config.spec.edge import BatchesSpec
from kvasir.core.errors import CapacityError, ConfigError
from kvasir_platform.cluster.preflight.finding import Finding

_REDIS_PORT = 6379
_CONNECT_S = 1.0
_S3_S = 5.0


@dataclass(frozen=True, slots=True)
class TierProbe:
    """Why a tier cannot be used, "" if it can or is not configured. `disk_blocked`: it never can be, because
    another file has the folder's name. `disk_free` in bytes."""

    disk_problem: str = ""
    disk_blocked: bool = False
    disk_free: int = 0
    redis_problem: str = ""


def probe_tiers(tiers: TiersSpec) -> TierProbe:
    """Inspect the disk's folder, or where it will be created, and connect to the Redis. Changes nothing."""
    problem, blocked, free = _disk(Path(tiers.disk.path)) if tiers.disk is not None else ("", False, 0)
    redis = knock(tiers.redis.url) if tiers.redis is not None else ""
    return TierProbe(problem, blocked, free, redis)


@dataclass(frozen=True, slots=True)
class BucketProbe:
    """Why the bucket of batches cannot be used, "" if it can or is not configured, and what to do. `refused`:
    a router does not start with it."""

    problem: str = ""
    remedy: str = ""
    refused: bool = False


def probe_bucket(batches: BatchesSpec) -> BucketProbe:
    """Read from the bucket of batches. Changes nothing."""
    if batches.storage is None or not batches.in_objects:
        return BucketProbe()
    from kvasir_platform.gateway.batches.storage.s3_storage import S3Storage

    try:
        S3Storage.at(batches.storage, batches.s3, limit_s=_S3_S).check()
    except ConfigError as error:
        problem, _, remedy = error.message.partition("; ")
        return BucketProbe(problem, remedy, refused=True)
    except CapacityError as error:
        return BucketProbe(
            error.message, "start it, or correct gateway.batches.s3.endpoint; batches wait for it"
        )
    return BucketProbe()


def bucket_findings(deployment: Deployment, probe: BucketProbe) -> Iterator[Finding]:
    """Yield what is known of the bucket of batches, if there is one."""
    if probe.problem:
        yield Finding("batches", "error" if probe.refused else "warning", probe.problem, probe.remedy)
    elif deployment.gateway.batches.in_objects:
        yield Finding("batches", "ok", f"{deployment.gateway.batches.storage} can be read")


def arena_bytes(deployment: Deployment) -> int:
    """Return the host memory of the tiers for each data-parallel rank of an engine."""
    return deployment.tiers.memory.bytes if deployment.tiers.configured else 0


def disk_bytes(deployment: Deployment) -> int:
    """Return the disk space that the tiers of all engines may use together."""
    if deployment.tiers.disk is None:
        return 0
    pools = [pool for view in deployment.views() if view.tiers.configured for pool in view.pools]
    engines = sum(pool.most * pool.engine.data_parallel_size for pool in pools)
    return engines * deployment.tiers.disk.bytes


def _disk(path: Path) -> tuple[str, bool, int]:
    # Path.exists() raises if a parent folder is not searchable.
    there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    if not there.is_dir():
        return f"{there} is not a folder", True, 0
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written by this user", False, 0
    return "", False, shutil.disk_usage(there).free


def knock(url: str) -> str:
    """Return why the address of a Redis does not accept connections, "" if it does."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _REDIS_PORT
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{host}:{port} does not answer: {error.strerror or error}"
    return ""


def tier_findings(deployment: Deployment, probe: TierProbe) -> Iterator[Finding]:
    """Yield one finding for each tier that cannot be used as configured; one in all if every tier can."""
    found = list(_troubles(deployment, probe))
    yield from found
    if deployment.tiers.configured and not found:
        yield Finding("tiers", "ok", "every tier can be reached")


def _troubles(deployment: Deployment, probe: TierProbe) -> Iterator[Finding]:
    if probe.disk_problem:
        yield Finding(
            "disk",
            "error" if probe.disk_blocked else "warning",
            f"tiers.disk: {probe.disk_problem}",
            "name another folder in tiers.disk.path, or let this user write there",
        )
    elif (needed := disk_bytes(deployment)) > probe.disk_free:
        yield Finding(
            "disk",
            "warning",
            f"tiers.disk: all may take {needed / 1e9:.1f} GB, and {probe.disk_free / 1e9:.1f} GB are free",
            "lower tiers.disk.bytes, which is for each engine, or free space",
        )
    if probe.redis_problem:
        yield Finding(
            "redis",
            "warning",
            f"tiers.redis: {probe.redis_problem}",
            "start it, or correct tiers.redis.url; without it, requests are served and nothing is shared",
        )
