"""Checks whether the tiers that a deployment names can be used from here.

A failed tier stops no request: requests are served without it. So a finding is a warning, except for a folder
that cannot be created.
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
from kvasir_platform.cluster.preflight.finding import Finding

_REDIS_PORT = 6379
_CONNECT_S = 1.0


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
