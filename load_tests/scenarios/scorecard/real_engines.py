"""Real vLLM workers under faults: clients must receive the same as without faults.

Workers and a router, each in its own process. Float32 and one thread each, so that KV computed by another
worker gives the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import openai
from tests.kit.lab import gateway
from tests.kit.lab.invariants import at_rest, ends_at_rest
from tests.kit.lab.processes import LabProcess, Processes

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    PoolSpec,
    SloSpec,
)
from kvasir.core.requests import Role
from load_tests.scenarios.scorecard.common import Figure, NotProven

WORDS = ("the", "king", "came", "to", "his", "people", "and", "said", "all", "of", "night", "great", "water")
REST_S = 20.0
START_S = 200.0
"""Four engines load vLLM at the same time, on as few as two cores."""
KILLED = ("", -9)

DEADLINES = (SloSpec(name="default", ttft_s=240.0, itl_s=1.0),)
"""Long enough that no request is refused, however slow the engines are on a loaded machine."""


@dataclass
class Heard:
    """One stream as its client received it. `lively` is set after 20 chunks."""

    sent_s: float = 0.0
    text: str = ""
    finish: str | None = None
    usage: tuple[int, int] = (0, 0)
    cached: int = 0
    tokens: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    lively: asyncio.Event = field(default_factory=asyncio.Event)

    def same(self, other: Heard) -> bool:
        """Whether both received the same, however it was split into chunks."""
        mine, theirs = ((heard.text, heard.finish, heard.usage, heard.tokens) for heard in (self, other))
        return mine == theirs

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first chunk."""
        return self.times_s[0] - self.sent_s

    @property
    def longest_gap_s(self) -> float:
        """The longest pause between two chunks."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


class Client:
    """OpenAI's client, without automatic retries."""

    def __init__(self, address: str, clock: MonotonicClock, key: str = "") -> None:
        self._clock = clock
        self._client = openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key=key or "none", max_retries=0, timeout=90
        )

    async def stream(self, heard: Heard, prompt: str, salt: str = "", **options: Any) -> None:
        """Read one greedy completion to its end. With a salt, blocks cached without it are not hit."""
        heard.sent_s = self._clock.now()
        stream = await self._client.completions.create(
            model="kvasir-tiny",
            prompt=prompt,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True} | ({"cache_salt": salt} if salt else {}),
            **options,
        )
        async for chunk in stream:
            if chunk.usage is not None:
                heard.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
                details = chunk.usage.prompt_tokens_details
                heard.cached = 0 if details is None else details.cached_tokens or 0
            for choice in chunk.choices:
                heard.text += choice.text
                heard.finish = choice.finish_reason or heard.finish
                if choice.logprobs is not None:
                    heard.tokens += choice.logprobs.tokens or []
            heard.times_s.append(self._clock.now())
            if len(heard.times_s) == 20:
                heard.lively.set()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


@dataclass
class Stage:
    """A router's gateway at `address`, its workers by address, and a client. `key` is an operator's key, if
    the gateway requires keys. `router` is its process, if it is one of this lab."""

    address: str
    workers: dict[str, LabProcess]
    client: Client
    clock: MonotonicClock
    key: str = ""
    router: LabProcess | None = None

    def begin(self, work: Sequence[dict[str, Any]]) -> tuple[list[Heard], asyncio.Future[list[None]]]:
        """Send all of `work` at once. The future completes with the last stream, or with the first error."""
        heard = [Heard() for _ in work]
        streams = [self.client.stream(each, **ask) for each, ask in zip(heard, work, strict=True)]
        return heard, asyncio.gather(*streams)

    async def undisturbed(self, work: Sequence[dict[str, Any]]) -> list[Heard]:
        """Return what clients receive without a fault. Raise NotProven if a fault happened."""
        before = await self.moved()
        heard, ended = self.begin(work)
        await ended
        if await self.moved() != before:
            raise NotProven("a fault happened in the run without faults")
        return heard

    async def moved(self) -> float:
        """Requests that failed over after their worker was lost."""
        return gateway.metric(await gateway.metrics(self.address, self.key), "kvasir_migrations_total")

    async def kill_busiest(self, pool: str) -> None:
        """Kill the worker of a pool with the most running requests, at least one. Raise NotProven.

        All workers of the pool are stopped while it is chosen: on a busy machine requests would end between
        the router's answer and the signal."""
        alive = {key: each for key, each in self.workers.items() if each.name == pool and each.alive}
        await gateway.until(lambda: self._busy(alive), REST_S, f"a request on {pool}", self.clock, 0.002)
        for each in alive.values():
            await each.freeze()
        try:
            # The router has read all that they had sent when it answers a second time.
            await self._in_flight(alive)
            requests, address = max((count, key) for key, count in (await self._in_flight(alive)).items())
            if not requests:
                raise NotProven(f"all requests on {pool} had ended before the fault")
            proof = await alive.pop(address).kill()
        finally:
            for each in alive.values():
                await each.thaw()
        if (proof.state, proof.status) != KILLED:
            raise NotProven(f"the worker was not killed: {proof}")

    async def _busy(self, workers: Mapping[str, LabProcess]) -> bool:
        return any((await self._in_flight(workers)).values())

    async def _in_flight(self, workers: Mapping[str, LabProcess]) -> dict[str, int]:
        """Running requests by worker, as the router counts them."""
        views = await gateway.workers(self.address, self.key)
        return {key: int(views[key]["in_flight"]) for key in workers}

    async def ready(self) -> bool:
        """Whether the router has a session with every worker."""
        views = await gateway.workers(self.address, self.key)
        # The router's first page may not list every worker yet.
        return all(address in views and views[address]["state"] == "ready" for address in self.workers)

    async def one(self, prompt: str, tokens: int, salt: str = "") -> Heard:
        """Run one stream to its end."""
        heard = Heard()
        await self.client.stream(heard, prompt, salt=salt, max_tokens=tokens)
        return heard

    async def loads(self, pool: str) -> list[dict[str, Any]]:
        """The last reported load of the workers of a pool."""
        views = (await gateway.workers(self.address, self.key)).values()
        return [view["load"] or {} for view in views if view["pool"] == pool]

    def worker(self, pool: str) -> LabProcess:
        """The first worker of a pool."""
        return next(process for process in self.workers.values() if process.name == pool)

    async def rests(self) -> float:
        """Return the seconds until nothing is accounted for, running or pinned. Raise Violated."""
        return await at_rest(self, REST_S)

    def pids(self) -> dict[str, int]:
        """The router, whose descriptors are compared: those of an engine grow with what it loads."""
        return {"router": self.router.pid} if self.router is not None and self.router.alive else {}

    def gateways(self) -> dict[str, str]:
        """The router's gateway, if it runs."""
        return {"router": self.address} if self.router is None or self.router.alive else {}


def engine(kv_cache_bytes: int = 64 << 20) -> EngineSpec:
    """The engine settings of all workers here."""
    return EngineSpec(kind="vllm", block_size=32, kv_cache_bytes=kv_cache_bytes, threads=1)


def apart(**fields: Any) -> Deployment:
    """Prefill and decode on separate workers."""
    return Deployment(
        model=ModelSpec(dtype="float32", max_model_len=2048),
        disaggregation="always",
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine()),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine()),
        ),
        gateway=GatewaySpec(port=0),
        slo=DEADLINES,
        **fields,
    )


def together(spec: EngineSpec | None = None, **fields: Any) -> Deployment:
    """One pool with role BOTH."""
    return Deployment(
        model=ModelSpec(dtype="float32", max_model_len=2048),
        disaggregation="never",
        pools=(PoolSpec(name="both", role=Role.BOTH, engine=spec or engine()),),
        gateway=GatewaySpec(port=0),
        slo=DEADLINES,
        **fields,
    )


@asynccontextmanager
async def stage(
    folder: Path,
    deployment: Deployment | None = None,
    pools: Sequence[str] = ("prefill", "prefill", "decode", "decode"),
    env: Mapping[str, str] | None = None,
    programs: Mapping[str, str] | None = None,
    *,
    key: str = "",
) -> AsyncIterator[Stage]:
    """Run a worker process per pool, and a router, until the context ends, when they must be at rest. `env`
    is added to their environment. `programs` names the module that runs a pool's workers, if it is not the
    default; `key` as in Stage."""
    deployment = deployment or apart()
    programs = programs or {}
    processes, clock = Processes(folder, {**os.environ, **(env or {})}), MonotonicClock()

    async def start(app: str, endpoints: list[str], event: str, pool: str = "") -> tuple[str, LabProcess]:
        discovery = {"kind": "static", "endpoints": endpoints}
        spec = folder / f"{app}.yaml"
        # JSON is valid YAML.
        spec.write_text(json.dumps(deployment.model_dump(mode="json") | {"discovery": discovery}))
        program = programs.get(pool, f"kvasir_platform.apps.{app}")
        argv = [sys.executable, "-m", program, f"--deployment={spec}"]
        argv += [f"--pool={pool}"] if pool else []
        process, said = await processes.start_ready(pool or app, argv, event, START_S)
        return str(said["address"]), process

    try:
        unused = [f"{pools[-1]}=127.0.0.1:1"]
        started = await asyncio.gather(*(start("worker_node", unused, "serving", pool) for pool in pools))
        endpoints = [f"{pool}={address}" for pool, (address, _) in zip(pools, started, strict=True)]
        address, router = await start("router_app", endpoints, "listening")
        made = Stage(address, dict(started), Client(address, clock, key), clock, key, router)
        try:
            await gateway.until(made.ready, REST_S, "all workers ready", clock)
            async with ends_at_rest(made, REST_S):
                yield made
        finally:
            await made.client.close()
    finally:
        await processes.close()


@dataclass(frozen=True, slots=True)
class Survived:
    """The result of `streams`: how many were `exact`, how many `moved`, the longest gap between two chunks of
    one stream, and how long after their end resources were still held."""

    streams: int
    exact: int
    moved: int
    longest_gap_s: float
    rest_s: float
    usage: tuple[tuple[int, int], ...]

    def figures(self) -> list[Figure]:
        """The result as rows of the scorecard."""
        return [
            Figure("with real vLLM: streams exact", self.exact, "streams", "higher", self.streams,
                   f"{self.moved} failed over; the longest pause {self.longest_gap_s:.2f} s"),
            Figure("with real vLLM: until nothing is held", self.rest_s, "s", "lower", 5.0),
        ]  # fmt: skip


async def decode_worker_killed(stage: Stage) -> Survived:
    """Eight streams of 1200 tokens, one with logprobs, one with text that is held back constantly."""
    work: list[dict[str, Any]] = [{"prompt": text, "max_tokens": 1200} for text in prompts(3, 8, words=30)]
    work[0]["logprobs"] = 2
    work[1]["stop"] = ["no text of this model reads like this one"]
    expected = await stage.undisturbed(work)
    before = await stage.moved()
    heard, ended = stage.begin(work)
    # Few streams: on a busy machine the first would end before the last begins.
    for lively in islice(asyncio.as_completed([each.lively.wait() for each in heard]), len(heard) // 4):
        await lively

    async def known() -> list[Heard]:
        return expected

    return await _survived(stage, "decode", before=before, heard=heard, ended=ended, expected=known)


async def prefill_worker_killed(stage: Stage) -> Survived:
    """Sixteen prompts of more than a thousand tokens. Their output lasts longer than finding the worker to
    kill, also on a busy machine."""
    work = [{"prompt": text, "max_tokens": 200} for text in prompts(4, 16, words=1200)]
    before = await stage.moved()
    heard, ended = stage.begin(work)

    async def afterwards() -> list[Heard]:
        # An earlier run would have left the prompts in the caches.
        return await stage.undisturbed(work)

    return await _survived(stage, "prefill", before=before, heard=heard, ended=ended, expected=afterwards)


async def _survived(
    stage: Stage,
    pool: str,
    *,
    before: float,
    heard: list[Heard],
    ended: asyncio.Future[list[None]],
    expected: Callable[[], Awaitable[list[Heard]]],
) -> Survived:
    await stage.kill_busiest(pool)
    await ended
    moved = int(await stage.moved() - before)
    if not moved:
        raise NotProven("nothing was hit")
    rest_s = await stage.rests()
    return Survived(
        len(heard),
        sum(each.same(other) for each, other in zip(heard, await expected(), strict=True)),
        moved,
        max(each.longest_gap_s for each in heard),
        rest_s,
        tuple(each.usage for each in heard),
    )


def prompts(seed: int, count: int, words: int) -> list[str]:
    """Texts that begin with different words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]
