"""Dynamo's part of the gateway bench: a worker that generates one constant word behind Dynamo's runtime.

Run in an environment that has `ai-dynamo`, with the folder of the bench's modules, the model's folder and the
id of the word's token as arguments. It generates tokens at the bench's rate; {"groups": n} on its standard
input spreads later answers over n times in a step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from importlib import import_module
from typing import Any


class Phase:
    """Streams whose tokens are due at the same times share one timer."""

    def __init__(self, ticker: Any, period_s: float, phase_s: float) -> None:
        self._next: asyncio.Future[None] | None = None
        self._ticker = ticker(self._tick, period_s, phase_s)

    async def wait(self) -> None:
        """Return at the next tick."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self._ticker.start()
        await asyncio.shield(self._next)

    def _tick(self) -> bool:
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_result(None)
        return waiting is not None


class Worker:
    """Answers token ids with the id of the word."""

    def __init__(self, pacing: Any, token: int) -> None:
        self._pacing = pacing
        self._token = token
        self._short = Phase(pacing.Ticker, pacing.SHORT_STEP_S, 0.0)
        self._count = 0
        self.regroup(20)

    def regroup(self, phases: int) -> None:
        """Spread later long answers over that many times in a step."""
        period = 1 / self._pacing.TOKENS_PER_S
        self._long = [Phase(self._pacing.Ticker, period, at / phases * period) for at in range(phases)]

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Generate one answer."""
        tokens = request["stop_conditions"]["max_tokens"] or 1
        self._count += 1
        phase = self._short if tokens <= self._pacing.SHORT else self._long[self._count % len(self._long)]
        for left in range(tokens - 1, -1, -1):
            if tokens > self._pacing.AT_ONCE:
                await phase.wait()
            if context.is_stopped():
                return
            word: dict[str, Any] = {"token_ids": [self._token]}
            yield word if left else word | {"finish_reason": "length"}


async def _serve() -> None:
    sys.path.insert(0, sys.argv[1])
    # Neither is installed where this is checked: one is in the given folder, the other belongs to the peer.
    pacing: Any = import_module("pacing")
    llm: Any = import_module("dynamo.llm")
    runtime_module: Any = import_module("dynamo.runtime")
    runtime = runtime_module.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("bench.backend.generate")
    config = llm.ModelRuntimeConfig()
    config.total_kv_blocks = 4_000_000
    config.max_num_seqs = 4096
    config.max_num_batched_tokens = 1_000_000
    config.context_length = 200_000
    await llm.register_model(
        llm.ModelInput.Tokens,
        llm.ModelType.Chat,
        endpoint,
        sys.argv[2],
        "bench",
        worker_type=llm.WorkerType.Aggregated,
        kv_cache_block_size=16,
        runtime_config=config,
        ignore_weights=True,
    )
    worker = Worker(pacing, int(sys.argv[3]))
    orders = asyncio.create_task(_obey(worker))
    await endpoint.serve_endpoint(worker.generate)
    orders.cancel()


async def _obey(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        worker.regroup(int(json.loads(line)["groups"]))


if __name__ == "__main__":
    uvloop: Any = import_module("uvloop")
    uvloop.run(_serve())
