"""Starts the cores of engines under test from a process that has imported vLLM.

That import takes most of the start of a small engine. Workers start their cores by vLLM's own means, in the
tests of workers and deployments too.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, ClassVar

from kvasir_workers.engines.vllm.replica import VllmReplica
from kvasir_workers.engines.vllm.setup.engine_errors import CONFIG_VARIABLE

_PRELOADED = ["vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker"]
_READ_BY_IMPORTS = ("OMP_", "TORCH", "VLLM_")
"""Variables that the preloaded modules read when they are imported begin with one of these, except for the
file that configures logging, which each engine has of its own and which is read again."""


def preload_core(engine: VllmReplica[Any]) -> None:
    """Have `engine`, which is not started yet, start its core so. Engines with another environment than the
    first are left alone."""
    engine._import_runtime = partial(_imported, engine._import_runtime)  # type: ignore[method-assign]


def _imported(import_runtime: Callable[[], ModuleType]) -> ModuleType:
    runtime = import_runtime()
    from vllm.v1.engine import utils as launching

    if not isinstance(launching.get_mp_context, partial):
        launching.get_mp_context = partial(_context, launching.get_mp_context)
        # Collections would walk all that was imported, as in tests/conftest.py.
        gc.freeze()
    return runtime


def _context(of_vllm: Callable[[], Any]) -> Any:
    """What vLLM starts a core with."""
    return _Context() if _read_by_imports() == _preloaded() else of_vllm()


@cache
def _preloaded() -> dict[str, str]:
    """Name what is imported by the process that is started with the first core. Return its environment."""
    forkserver.set_forkserver_preload(_PRELOADED)
    return _read_by_imports()


def _read_by_imports() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_IMPORTS)}
    found.pop(CONFIG_VARIABLE, None)
    return found


class _Process(ForkServerProcess):
    """Has the environment of its start, as a spawned process has."""

    def __init__(self, target: Callable[..., None], name: str, kwargs: dict[str, Any]) -> None:
        super().__init__(target=_run, name=name, args=(target, kwargs))

    def start(self) -> None:
        self._kwargs = {"environ": dict(os.environ)}
        super().start()


class _Context(ForkServerContext):
    Process: ClassVar[Any] = _Process


def _run(target: Callable[..., None], kwargs: dict[str, Any], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    from vllm.logger import _configure_vllm_root_logger

    _configure_vllm_root_logger()
    target(**kwargs)
