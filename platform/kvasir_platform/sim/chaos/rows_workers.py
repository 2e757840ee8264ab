"""Scorecard rows about the loss of one worker or router at every state of a stream, in virtual time.

Each function runs one seed and returns the measurements, with the proof that the fault happened. Times are in
simulated seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SimSpec
from kvasir.core.kv import KvState
from kvasir.core.quantiles import quantile
from kvasir.core.requests import Role, Sampling
from kvasir.ports.router import WorkerView
from kvasir_platform.sim.chaos.checks import broken_streams
from kvasir_platform.sim.chaos.load import Gaps, Load, ended, outcomes
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock
from kvasir_platform.sim.stories import simulate

_POLL_S = 0.005
NOBODY: frozenset[str] = frozenset()


def split(prefill: int, decode: int) -> Deployment:
    """Prefill and decode apart; a step takes 20 ms, and KV transfers take time."""
    engine = EngineSpec(
        kind="sim",
        block_size=16,
        kv_cache_bytes=32 << 20,
        sim=SimSpec(prefill_tokens_per_s=4_000.0, decode_step_s=0.02, transfer_latency_s=0.05),
    )
    pools = (
        PoolSpec(name="prefill", role=Role.PREFILL, replicas=prefill, engine=engine),
        PoolSpec(name="decode", role=Role.DECODE, replicas=decode, engine=engine),
    )
    return Deployment.model_validate({"disaggregation": "always", "pools": pools})


def _rng(seed: int) -> Random:
    return Random(f"{seed}/row")  # noqa: S311 - a row has to repeat


def _busiest(cluster: Cluster, pool: str) -> str:
    workers = {w: each for w, each in cluster.workers.items() if each.endpoint.pool == pool}
    return max(workers, key=lambda worker_id: workers[worker_id].host.live_requests)


async def _until(
    cluster: Cluster, router_id: str, worker_id: str, met: Callable[[WorkerView], bool]
) -> float:
    """Wait for a condition on the router's view of a worker; return how long it took."""
    began = cluster.clock.now()
    router = cluster.routers[router_id].router
    while not any(met(view) for view in router.workers() if view.worker_id == worker_id):
        await cluster.clock.sleep(_POLL_S)
    return cluster.clock.now() - began


def _given_nothing(view: WorkerView) -> bool:
    return view.state != "ready" or view.health.state in ("ejected", "unresponsive")


def _exact(view: WorkerView) -> bool:
    return view.state == "ready" and view.kv is not None and view.kv.state is KvState.EXACT


@dataclass(frozen=True, slots=True)
class LostWorker:
    """Rows 1, 4 and 5. `on_it` streams ran on the worker when it was lost; `out_s` until the router stopped
    using it, `exact_s` from its return until its index was EXACT (0: it did not return). `wrong` names
    incomplete or incorrect streams; `p99_gap_s` and `max_gap_s` are over the longest gaps of all streams."""

    seed: int
    streams: int
    on_it: int
    ended: dict[str, int]
    wrong: tuple[str, ...]
    migrations: int
    p99_gap_s: float
    max_gap_s: float
    out_s: float
    exact_s: float = 0.0


def row_1(seed: int = 0, *, streams: int = 80) -> LostWorker:
    """A decode worker is killed in mid-stream."""

    async def kill(cluster: Cluster, victim: str) -> tuple[float, float]:
        await cluster.kill(victim)
        out_s = await _until(cluster, "router", victim, _given_nothing)
        await cluster.forget(victim)
        return out_s, 0.0

    return _lose(seed, streams, kill)


def row_4(seed: int = 0, *, streams: int = 80) -> LostWorker:
    """One decode worker of eight is stopped, and continues after 8 s."""

    async def freeze(cluster: Cluster, victim: str) -> tuple[float, float]:
        cluster.faults.freeze(victim)
        out_s = await _until(cluster, "router", victim, _given_nothing)
        await cluster.clock.sleep(8.0 - out_s)
        cluster.faults.thaw(victim)
        return out_s, await _until(cluster, "router", victim, _exact)

    return _lose(seed, streams, freeze)


def row_5(seed: int = 0, *, streams: int = 80) -> LostWorker:
    """One decode worker is unreachable for 10 s."""

    async def part(cluster: Cluster, victim: str) -> tuple[float, float]:
        cluster.faults.partition(victim)
        out_s = await _until(cluster, "router", victim, _given_nothing)
        await cluster.clock.sleep(10.0 - out_s)
        cluster.faults.heal(victim)
        return out_s, await _until(cluster, "router", victim, _exact)

    return _lose(seed, streams, part)


def _lose(
    seed: int, count: int, fault: Callable[[Cluster, str], Awaitable[tuple[float, float]]]
) -> LostWorker:
    measured: list[LostWorker] = []
    gaps = Gaps(VirtualClock())

    async def story(cluster: Cluster) -> None:
        load = Load(cluster, _rng(seed), rate=count, prompt_tokens=48, output_tokens=100)
        streams = [stream for _ in range(count) if (stream := load.send()) is not None]
        for stream in streams:
            await stream.started.wait()
        victim = _busiest(cluster, "decode")
        on_it = cluster.workers[victim].host.live_requests
        out_s, exact_s = await fault(cluster, victim)
        await ended(streams)
        summaries = [stream.summary for stream in streams if stream.summary is not None]
        measured.append(
            LostWorker(
                seed=seed,
                streams=count,
                on_it=on_it,
                ended=outcomes(streams),
                wrong=tuple(broken_streams(cluster.deployment, streams, NOBODY)),
                migrations=sum(summary.migrations for summary in summaries),
                p99_gap_s=quantile(gaps.longest.values(), 0.99),
                max_gap_s=max(gaps.longest.values()),
                out_s=out_s,
                exact_s=exact_s,
            )
        )

    simulate(split(2, 8), story, seed, on_stream=gaps)
    return measured[0]


HANDOFF_STATES = ("before", "prefilling", "handed over", "pulling", "after")
_STEP_S = 0.01
_HANDOFF_S = 0.45


@dataclass(frozen=True, slots=True)
class LostPrefill:
    """Row 2. `kills` of the prefill worker by the state of its only request; `wrong` names incorrect streams,
    `max_rest_s` is the longest time after a stream's end that anything was still pinned."""

    kills: dict[str, int]
    wrong: tuple[str, ...]
    max_rest_s: float


def row_2() -> LostPrefill:
    """The prefill worker is killed at every hundredth of a second around the hand-off."""
    kills = dict.fromkeys(HANDOFF_STATES, 0)
    wrong: list[str] = []
    rests: list[float] = []
    for step in range(round(_HANDOFF_S / _STEP_S)):
        at_s = step * _STEP_S

        async def story(cluster: Cluster, at_s: float = at_s) -> None:
            for worker_id in cluster.workers:
                cluster.network.weather(worker_id).set(delay_s=0.015)
            sampling = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)
            stream = cluster.submit([100 + one for one in range(400)], sampling)
            await cluster.clock.sleep(at_s)
            record = cluster.router.explain(stream.request.request_id)
            victim = str(record.prefill_worker) if record is not None else ""
            kills[_handoff_state(cluster, victim, stream)] += 1
            await cluster.kill(victim)
            await stream.ended.wait()
            wrong.extend(
                f"{at_s:g} s: {fault}" for fault in broken_streams(cluster.deployment, [stream], NOBODY)
            )
            ended_s = cluster.clock.now()
            await cluster.rest()
            rests.append(cluster.clock.now() - ended_s)

        simulate(split(2, 2), story)
    return LostPrefill(kills, tuple(wrong), max(rests))


def _handoff_state(cluster: Cluster, prefill: str, stream: ClientStream) -> str:
    worker = cluster.workers[prefill]
    if stream.started.is_set():
        return "after"
    if worker.engine.load().kv_blocks_leased:
        decoding = any(w.host.live_requests for w in cluster.workers.values() if w is not worker)
        return "pulling" if decoding else "handed over"
    if worker.host.live_requests:
        return "prefilling"
    return "after" if worker.faults.submitted else "before"


@dataclass(frozen=True, slots=True)
class LostRouter:
    """Row 6. Of `own` streams of the killed router, `cut` ended; `others` of the other one ended as
    `others_ended`. `exact_s` until a new router knew every worker's blocks."""

    seed: int
    own: int
    cut: int
    others: int
    others_ended: dict[str, int]
    wrong: tuple[str, ...]
    exact_s: float


def row_6(seed: int = 0, *, streams: int = 40) -> LostRouter:
    """One of two routers is killed in mid-stream, and a new one replaces it."""
    measured: list[LostRouter] = []

    async def story(cluster: Cluster) -> None:
        first = next(iter(cluster.routers))
        second = cluster.add_router()
        await cluster.ready()
        load = Load(cluster, _rng(seed), rate=1.0, prompt_tokens=64, output_tokens=60)
        own = [stream for _ in range(streams) if (stream := load.send(first)) is not None]
        others = [stream for _ in range(streams) if (stream := load.send(second)) is not None]
        for stream in own + others:
            await stream.started.wait()
        cut = sum(not stream.ended.is_set() for stream in own)
        await cluster.kill_router(first)
        third = cluster.add_router()
        exact_s = [await _until(cluster, third, worker_id, _exact) for worker_id in list(cluster.workers)]
        await ended(others)
        measured.append(
            LostRouter(
                seed,
                len(own),
                cut,
                len(others),
                outcomes(others),
                tuple(broken_streams(cluster.deployment, others, NOBODY)),
                sum(exact_s),
            )
        )

    simulate(split(2, 4), story, seed)
    return measured[0]


@dataclass(frozen=True, slots=True)
class Rolled:
    """Row 13. `restarts` of workers, one after the other, under load."""

    seed: int
    restarts: int
    lives: int
    requests: int
    ended: dict[str, int]
    refused: dict[str, int]
    wrong: tuple[str, ...]
    migrations: int


def row_13(seed: int = 0, *, restarts: int = 20, grace_s: float = 1.0) -> Rolled:
    """Rolling restarts. Streams take longer than `grace_s`, so that some fail over."""
    measured: list[Rolled] = []

    async def story(cluster: Cluster) -> None:
        load = Load(cluster, _rng(seed), rate=8.0, prompt_tokens=64, output_tokens=100)
        order = list(cluster.workers)
        for number in range(restarts):
            worker_id = order[number % len(order)]
            await load.run(1.0)
            restarting = asyncio.ensure_future(cluster.faults.restart(worker_id, grace_s))
            await load.run(grace_s + 0.5)
            await restarting
            await _until(cluster, "router", worker_id, lambda view: view.state == "ready")
        await ended(load.streams)
        lives = sum(worker.epoch - 1 for worker in cluster.workers.values())
        summaries = [stream.summary for stream in load.streams if stream.summary is not None]
        measured.append(
            Rolled(
                seed,
                restarts,
                lives,
                len(load.streams),
                outcomes(load.streams),
                dict(load.refused),
                tuple(broken_streams(cluster.deployment, load.streams, NOBODY)),
                sum(summary.migrations for summary in summaries),
            )
        )

    simulate(split(2, 3), story, seed)
    return measured[0]
