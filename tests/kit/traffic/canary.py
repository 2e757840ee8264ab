"""A gateway with routes in front of scripted engines, whose times pass on a clock that the test sets."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.kit.clocks import StillClock
from tests.kit.gateway.http_edge import listening, models_of
from tests.kit.gateway.scripted_router import ScriptedRouter, ScriptedStream

from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir.core.errors import KvasirError
from kvasir.core.requests import FinishReason
from kvasir.ports.traffic.rollouts import RolloutStore
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.gateway.traffic.memory_rollouts import MemoryRollouts
from kvasir_platform.gateway.traffic.rollouts import Rollouts

CHAT = "/v1/chat/completions"
TWO_MODELS: dict[str, Any] = {
    "disaggregation": "never",
    "pools": [{"name": "serve", "role": "both"}, {"name": "second", "role": "both", "model": "second"}],
    "models": [{"name": "second", "source": Deployment().model.source}],
    "slo": [{"name": "default", "ttft_s": 2.0, "itl_s": 0.1}, {"name": "fast", "ttft_s": 0.2}],
}
"""A spec of kvasir-tiny under its own name, and once more as `second`."""


class HeldClock(StillClock):
    """A clock that the test sets, and on which background work waits for ever."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


@dataclass
class Engine:
    """How one model answers: the mean seconds to the first token and between tokens, each drawn within
    `spread`, and the error of a fraction `fails` of requests."""

    ttft_s: float = 0.2
    itl_s: float = 0.02
    spread: float = 0.3
    fails: float = 0.0
    error: KvasirError | None = None
    text: str = "Hello"
    tokens: int = 8


@dataclass
class RoutedEdge:
    """A running gateway with routes. `engines` are by model name; `served` lists the models that were sent
    requests."""

    client: httpx.AsyncClient
    router: ScriptedRouter
    metrics: Metrics
    rollouts: Rollouts
    clock: HeldClock
    engines: dict[str, Engine]
    numbers: Iterator[int] = field(default_factory=itertools.count)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def served(self) -> list[str]:
        return [stream.request.model for stream in self.router.streams]

    def answer(self, stream: ScriptedStream) -> None:
        """Answer one request as the engine of its model does."""
        engine = self.engines[stream.request.model]
        if engine.error is not None and self.rng.random() < engine.fails:
            stream.fail(engine.error)
            return
        arrival = stream.request.arrival_s
        spread = 1.0 + engine.spread * (2 * self.rng.random() - 1)
        self.clock.at = max(self.clock.at, arrival) + engine.ttft_s * spread
        for number in range(engine.tokens):
            last = number == engine.tokens - 1
            stream.emit(engine.text, finish=FinishReason.STOP if last else None)
            self.clock.at += 0.0 if last else engine.itl_s * spread
        stream.finish()

    async def chat(self, model: str = "chat", **fields: Any) -> httpx.Response:
        """Send one chat."""
        headers = {"x-request-id": f"r{next(self.numbers)}", **fields.pop("headers", {})}
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}
        return await self.client.post(CHAT, content=json.dumps(body), headers=headers)

    async def chats(self, count: int, **fields: Any) -> list[httpx.Response]:
        """Send chats one after the other."""
        return [await self.chat(**fields) for _ in range(count)]


@asynccontextmanager
async def routed(
    *routes: dict[str, Any],
    store: RolloutStore | None = None,
    engines: dict[str, Engine] | None = None,
    **parts: Any,
) -> AsyncIterator[RoutedEdge]:
    """A gateway of two models with `routes` that serves until the context ends."""
    gateway_spec = GatewaySpec(port=0, drain_timeout_s=0.0, edges=0)
    spec = {"gateway": gateway_spec, **TWO_MODELS, "routes": list(routes), **parts}
    deployment = Deployment.model_validate(spec)
    clock = HeldClock(1000.0)
    router = ScriptedRouter(clock)
    metrics = make_metrics(deployment)
    rollouts = Rollouts(deployment.routes, store or MemoryRollouts(), clock, clock.now)
    router.on_summary = rollouts.ended
    gateway = make_gateway(deployment, router, clock, metrics, models_of(deployment), rollouts=rollouts)
    async with (
        listening(gateway) as (host, port, _),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=20) as client,
    ):
        known = {"kvasir-tiny": Engine(), "second": Engine()} | (engines or {})
        edge = RoutedEdge(client, router, metrics, rollouts, clock, known)
        router.script = edge.answer
        yield edge
