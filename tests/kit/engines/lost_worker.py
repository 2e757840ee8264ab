"""A real engine in a process of its own, which a test kills: what it leaves behind, and to whom.

The process (`python -m tests.kit.engines.lost_worker SPEC`) runs the first pool of a spec as a worker does.
It answers each line of its standard input, a prompt, with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.engines.bench import EngineBench
from tests.kit.engines.recorder import DeltaRecorder
from tests.kit.suite.started import count_start

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment
from kvasir.core.kv import Medium
from kvasir.core.requests import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
_MARK = "@ "
_GONE_MS = 10_000
_PATIENCE_S = 60.0


@dataclass
class LostWorker:
    """The process. `cores` are its engine's processes, `shared_tier` names the tier that it shares."""

    shared_tier: str
    cores: tuple[int, ...]
    _process: subprocess.Popen[str]

    def ask(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that it generates greedily, once the blocks of the prompt are in the tiers below
        host memory."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(prompt)) + "\n")
        self._process.stdin.flush()
        tokens: list[int] = _heard(self._process)["tokens"]
        return tokens

    def kill(self) -> set[int]:
        """Kill it with SIGKILL. Return the pids of its cores that exit by themselves."""
        watched = {os.pidfd_open(pid): pid for pid in self.cores}
        self._process.kill()
        self._process.wait()
        poll = select.poll()
        for each in watched:
            poll.register(each, select.POLLIN)
        gone: set[int] = set()
        while len(gone) < len(watched) and (ended := poll.poll(_GONE_MS)):
            for each, _ in ended:
                poll.unregister(each)
                gone.add(watched[each])
        for each in watched:
            os.close(each)
        return gone


@contextmanager
def lost_worker(deployment: Deployment, folder: Path) -> Iterator[LostWorker]:
    """A worker that has started. It is killed at the end if the test has not done so; `folder` is for its
    spec and its log."""
    spec = folder / "lost.json"
    spec.write_text(deployment.model_dump_json())
    with (folder / "lost.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(spec)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        began = _heard(process)
        yield LostWorker(began["shared_tier"], tuple(began["cores"]), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def _heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the process says next."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith(_MARK)), None)
    assert line is not None, "the worker has ended"
    heard: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return heard


def _say(**fields: Any) -> None:
    print(_MARK + json.dumps(fields), flush=True)  # noqa: T201


async def _answer(bench: EngineBench, prompt: list[int]) -> None:
    def stored() -> list[int]:
        lower = (Medium.DISK, Medium.REMOTE)
        return [tier.stored_blocks for tier in bench.engine.load().tiers if tier.medium in lower]

    blocks = len(prompt) // bench.identity.kv.block_size
    wanted = [each + blocks for each in stored() or [0, 0]]
    done = await bench.generate(prompt, GREEDY)
    async with asyncio.timeout(_PATIENCE_S):
        while len(stored()) < len(wanted) or any(a < b for a, b in zip(stored(), wanted, strict=True)):
            await bench.generate([7], GREEDY)
    _say(tokens=done.choice().tokens)


async def _main() -> None:
    from kvasir_workers.engines.vllm.engine import VllmEngine

    deployment = Deployment.model_validate_json(Path(sys.argv[1]).read_text())
    pool = deployment.pools[0]
    engine = VllmEngine(deployment, pool, model_path=str(resolve_model(deployment.model.source)))
    recorder = DeltaRecorder()
    identity = await engine.start(recorder, worker_id=f"{pool.name}-lost", epoch=1)
    count_start("engines of vLLM", "in a process that is killed")
    bench = EngineBench(engine, identity, recorder)
    cores = [child.pid for child in multiprocessing.active_children()]
    _say(cores=cores, shared_tier=identity.shared_tier)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await _answer(bench, json.loads(line))


if __name__ == "__main__":
    asyncio.run(_main())
