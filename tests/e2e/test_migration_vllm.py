"""Real vLLM workers are killed under streams: every stream ends with the text of an undisturbed one.

Two prefill and two decode workers and a router, each a process of its own; each test kills one worker.
Float32 and one thread each, so that KV computed elsewhere gives the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import pytest_asyncio

from kvasir.clock import MonotonicClock
from kvasir.config.spec import Deployment, EngineSpec, GatewaySpec, ModelSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.sim.lab import gateway
from kvasir_platform.sim.lab.invariants import unrest
from kvasir_platform.sim.lab.processes import LabProcess, Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.asyncio(loop_scope="module")]

WORDS = ("the", "king", "came", "to", "his", "people", "and", "said", "all", "of", "night", "great", "water")
REST_S = 20.0
# Four at once load vLLM on as few as two cores.
START_S = 200.0


@dataclass
class Heard:
    """One stream as its client heard it. `lively` is set once 20 chunks have come."""

    text: str = ""
    finish: str | None = None
    usage: tuple[int, int] = (0, 0)
    tokens: list[str] = field(default_factory=list)
    chunks: int = 0
    lively: asyncio.Event = field(default_factory=asyncio.Event)

    def same(self, other: Heard) -> bool:
        """Whether the same was heard, however it was cut into chunks."""
        return (self.text, self.finish, self.usage, self.tokens) == (
            other.text,
            other.finish,
            other.usage,
            other.tokens,
        )


class Client:
    """OpenAI's own client; it does not try again by itself."""

    def __init__(self, address: str) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=90
        )

    async def stream(self, heard: Heard, prompt: str, **options: Any) -> None:
        """Read one greedy completion to its end."""
        stream = await self._client.completions.create(
            model="kvasir-tiny",
            prompt=prompt,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            **options,
        )
        async for chunk in stream:
            if chunk.usage is not None:
                heard.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            for choice in chunk.choices:
                heard.text += choice.text
                heard.finish = choice.finish_reason or heard.finish
                if choice.logprobs is not None:
                    heard.tokens += choice.logprobs.tokens or []
            heard.chunks += 1
            if heard.chunks == 20:
                heard.lively.set()

    async def close(self) -> None:
        """Drop its connections."""
        await self._client.close()


@dataclass
class Stage:
    """A router's gateway at `address`, its workers by the addresses where it knows them, and a client."""

    address: str
    workers: dict[str, LabProcess]
    client: Client
    clock: MonotonicClock

    def begin(self, work: Sequence[dict[str, Any]]) -> tuple[list[Heard], asyncio.Future[list[None]]]:
        """Send all of `work` at once; the future ends with the last stream, or with the first error."""
        heard = [Heard() for _ in work]
        streams = [self.client.stream(each, **ask) for each, ask in zip(heard, work, strict=True)]
        return heard, asyncio.gather(*streams)

    async def undisturbed(self, work: Sequence[dict[str, Any]]) -> list[Heard]:
        """What clients hear when nothing happens."""
        before = await self.moved()
        heard, ended = self.begin(work)
        await ended
        assert await self.moved() == before
        return heard

    async def moved(self) -> float:
        """Requests that have gone on after the loss of their worker."""
        return gateway.metric(await gateway.metrics(self.address), "kvasir_migrations_total")

    async def kill_the_busiest(self, pool: str) -> None:
        """SIGKILL of the worker of a pool on which most requests run, of which there is at least one."""
        found: list[dict[str, Any]] = []

        async def busy() -> bool:
            views = (await gateway.workers(self.address)).values()
            alive = (view for view in views if view["pool"] == pool and self.workers[view["address"]].alive)
            found[:] = sorted(alive, key=lambda view: int(view["in_flight"]))[-1:]
            return bool(found[0]["in_flight"])

        await gateway.until(busy, REST_S, f"a request on {pool}", self.clock, 0.002)
        proof = await self.workers[found[0]["address"]].kill()
        assert (proof.state, proof.status) == ("", -9)

    async def ready(self) -> bool:
        """Whether the router has a session with every worker."""
        views = await gateway.workers(self.address)
        return all(views[address]["state"] == "ready" for address in self.workers)

    async def rests(self) -> None:
        """Return when nothing is accounted for, runs or is pinned any more; fails with what remains."""
        left: list[str] = []

        async def resting() -> bool:
            left[:] = unrest(await gateway.status(self.address), await gateway.metrics(self.address))
            return not left

        with contextlib.suppress(TimeoutError):
            await gateway.until(resting, REST_S, "rest", self.clock)
        assert left == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    pytest.importorskip("vllm")
    engine = EngineSpec(kind="vllm", block_size=32, kv_cache_bytes=64 << 20, threads=1)
    deployment = Deployment(
        model=ModelSpec(dtype="float32", max_model_len=2048),
        disaggregation="always",
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        ),
        gateway=GatewaySpec(port=0),
    )
    folder = tmp_path_factory.mktemp("migration")
    processes = Processes(folder)

    async def start(app: str, endpoints: list[str], event: str, pool: str = "") -> tuple[str, LabProcess]:
        discovery = {"kind": "static", "endpoints": endpoints}
        spec = folder / f"{app}.yaml"
        # JSON is YAML too.
        spec.write_text(json.dumps(deployment.model_dump(mode="json") | {"discovery": discovery}))
        argv = [sys.executable, "-m", f"kvasir_platform.apps.{app}", f"--deployment={spec}"]
        argv += [f"--pool={pool}"] if pool else []
        process, said = await processes.start_ready(pool or app, argv, event, START_S)
        return str(said["address"]), process

    try:
        pools = ("prefill", "prefill", "decode", "decode")
        unused = ["decode=127.0.0.1:1"]
        started = await asyncio.gather(*(start("worker_node", unused, "serving", pool) for pool in pools))
        endpoints = [f"{pool}={address}" for pool, (address, _) in zip(pools, started, strict=True)]
        address, _ = await start("router_app", endpoints, "listening")
        made = Stage(address, dict(started), Client(address), MonotonicClock())
        await gateway.until(made.ready, REST_S, "all workers ready", made.clock)
        yield made
        await made.client.close()
    finally:
        await processes.close()


def prompts(seed: int, count: int, words: int) -> list[str]:
    """Texts that begin with different words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


async def test_streams_on_a_killed_decode_worker_go_on_token_for_token(stage: Stage) -> None:
    work: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": 300} for prompt in prompts(3, 8, words=30)]
    work[0]["logprobs"] = 2
    # Text is held back all the time, and comes out at the end.
    work[1]["stop"] = ["no text of this model reads like this one"]
    expected = await stage.undisturbed(work)
    heard, ended = stage.begin(work)
    await asyncio.gather(*(each.lively.wait() for each in heard))
    before = await stage.moved()
    await stage.kill_the_busiest("decode")
    assert all(each.finish is None for each in heard), "streams had ended before the fault"
    await ended
    assert await stage.moved() > before, "no stream was hit"
    assert [each.same(other) for each, other in zip(heard, expected, strict=True)] == [True] * len(work)
    assert {each.usage[1] for each in heard} == {300}
    await stage.rests()


async def test_prompts_on_a_killed_prefill_worker_are_prefilled_elsewhere(stage: Stage) -> None:
    work = [{"prompt": prompt, "max_tokens": 24} for prompt in prompts(4, 16, words=1200)]
    before = await stage.moved()
    heard, ended = stage.begin(work)
    await stage.kill_the_busiest("prefill")
    assert all(each.finish is None for each in heard), "streams had ended before the fault"
    await ended
    assert await stage.moved() > before, "no prompt was hit"
    expected = await stage.undisturbed(work)
    assert [each.same(other) for each, other in zip(heard, expected, strict=True)] == [True] * len(work)
    assert min(each.usage[0] for each in heard) > 1000
    await stage.rests()
