"""How long one engine takes to start, with and without what shortens it, on real vLLM.

Each start is a process of its own, from the spawn to an engine that has warmed up. Weights are read from a
cold page cache: their files, and no others, are evicted before each start. Variants alternate, so that other
load on the machine meets all of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.kit.models.sharded import make_sharded

from kvasir.config.load.loader import loads
from kvasir.config.load.model_files import resolve_model
from load_tests.page_cache import evict
from load_tests.report import Row, median

LAYERS = 10
TINY = "kvasir-tiny"
START_LIMIT_S = 400.0
OPTIONS = ("disaggregation=never", "model.max_model_len=1024")
EAGER = "pools.serve.engine.args={enforce_eager: true}"
COMPILED = "pools.serve.engine.args={enforce_eager: false}"


async def _start(options: Sequence[str]) -> None:
    from kvasir_workers.engines.vllm.engine import VllmEngine

    deployment = loads("", "start", options)
    engine = VllmEngine(
        deployment, deployment.pools[0], model_path=str(resolve_model(deployment.model.source))
    )
    await engine.start(lambda batch: None, worker_id="start", epoch=1)
    print("ready", flush=True)
    await engine.stop()


def start_s(*options: str, variables: Mapping[str, str] = MappingProxyType({})) -> float:
    """Seconds from the spawn of a process, with these `variables` in its environment, to its warm engine.
    Raise RuntimeError if it does not start within START_LIMIT_S."""
    command = [sys.executable, "-m", "load_tests.scenarios.start_up", *OPTIONS, *options]
    with tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **variables}
        ) as child:
            limit = threading.Timer(START_LIMIT_S, child.kill)
            limit.start()
            try:
                assert child.stdout is not None
                ready = next((line for line in child.stdout if line == "ready\n"), None)
                took = time.monotonic() - began
                child.communicate()
            finally:
                limit.cancel()
        if ready is None:
            errors.seek(0)
            raise RuntimeError(f"no start with {options}: {errors.read()[-2000:]}")
    return took


def measure(rounds: int) -> Iterator[list[Row]]:
    """Measure all variants `rounds` times, and yield the rows of all rounds so far after each, which takes
    minutes."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvasir-start-") as made:
        model = make_sharded(Path(made) / "model", LAYERS)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        for number in range(rounds):
            for name, took in _round(model, Path(made)):
                found.setdefault(name, []).append(took)
                print(f"  round {number + 1} of {rounds}: {name}: {took:.1f} s", flush=True)
            yield rows(found, size)


def _round(model: Path, made: Path) -> Iterator[tuple[str, float]]:
    kept = f"worker.compile_cache_dir={made / 'eager'}"
    for strategy in ("lazy", "prefetch"):
        evict(model.glob("*.safetensors"))
        yield strategy, start_s(f"model.source={model}", f"model.load.strategy={strategy}", kept)
    yield "warm", start_s(f"model.source={model}", "model.load.strategy=prefetch", kept)
    shutil.rmtree(made / "compiled", ignore_errors=True)
    kept = f"worker.compile_cache_dir={made / 'compiled'}"
    yield "eager", start_s(f"model.source={TINY}", EAGER, kept)
    yield "compiled, empty", start_s(f"model.source={TINY}", COMPILED, kept)
    yield "compiled, kept", start_s(f"model.source={TINY}", COMPILED, kept)


def rows(found: Mapping[str, Sequence[float]], size: int) -> list[Row]:
    """The report rows; `size` is that of the larger model's weights in bytes."""
    read = f"engine start, {size / 1e9:.1f} GB of weights"
    names = {
        "lazy": (f"{read}, page cache cold, load.strategy lazy", ""),
        "prefetch": (f"{read}, page cache cold, load.strategy prefetch", "the default here"),
        "warm": (f"{read}, after another worker of the node has read them", "load.strategy prefetch"),
        "eager": (f"engine start, {TINY}, without compilation", "the default on CPUs"),
        "compiled, empty": (f"engine start, {TINY}, compiled, nothing kept", "enforce_eager: false"),
        "compiled, kept": (f"engine start, {TINY}, compiled, code of an earlier start kept", "likewise"),
    }
    made = []
    for key, (name, note) in names.items():
        value, spread = median(found[key])
        made.append(Row(name, value, "s", "lower", spread=spread, note=note))
    return made


if __name__ == "__main__":
    asyncio.run(_start(sys.argv[1:]))
