"""Gain of transferring KV while the rest of its prompt is still being computed.

Two real vLLM engines, one for prefill and one for decode, each with its core in its own process; the bench
plays the router. New prompts run in pairs: one is handed over as soon as a part of it can be pulled, the
other when it is complete, in alternating order, so that other load on the machine affects both.

    make bench-overlap
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec, TransferSpec
from kvasir.core.requests import Leg, Role
from kvasir_workers.engines.vllm.engine import VllmEngine
from load_tests.report import Row, median, write

LENGTHS = (1024, 2048, 4000)
CHUNKS = (256, 512)
PAIRS = 15


@dataclass(frozen=True, slots=True)
class Taken:
    """Times of one prompt in milliseconds: to its first token, from the end of its prefill to its first
    token, and of the pull; and CPU of the decode engine."""

    ttft: float
    tail: float
    pull: float
    cpu: float


@dataclass(slots=True)
class Pairs:
    """Prompts of one length: pulled during computation, and after."""

    overlapped: list[Taken] = field(default_factory=list)
    after: list[Taken] = field(default_factory=list)


class Bench:
    """Both engines; `decoding` are the processes of the decode engine."""

    def __init__(
        self, prefill: EngineBench, decode: EngineBench, decoding: list[psutil.Process], seed: int
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._decoding = decoding
        self._prompts = FreshPrompts(random.Random(seed))

    async def measure(self, length: int, pairs: int) -> Pairs:
        """Measure, after one warm-up pair."""
        measured = Pairs()
        for number in range(pairs + 1):
            for early in (True, False) if number % 2 else (False, True):
                taken = await self._first_token(length, early=early)
                if number:
                    (measured.overlapped if early else measured.after).append(taken)
        return measured

    async def _first_token(self, length: int, *, early: bool) -> Taken:
        """Raise RuntimeError if the prompt was not handed over when it should have been."""
        prompt, sampling = self._prompts.fresh(length), self._prompts.sampling(max_tokens=2)
        prefill = self._prefill.request(prompt, sampling, leg=Leg.PREFILL)
        began, used = time.perf_counter(), self._cpu_s()
        self._prefill.engine.submit([prefill])
        computed = asyncio.create_task(self._computed(prefill.request_id))
        offered = await self._prefill.first_delta(prefill.request_id)
        if offered.last is not None and offered.deltas == 1:
            raise RuntimeError(f"a prompt of {length} tokens was not handed over before its end")
        if not early:
            await computed
        decode = self._decode.request(prompt, sampling, leg=Leg.DECODE, handoff=offered.offered)
        self._decode.engine.submit([decode])
        await self._decode.first_delta(decode.request_id)
        first_token = time.perf_counter()
        done = await self._decode.ended(decode.request_id)
        used = self._cpu_s() - used
        if done.last is None or done.last.usage is None or done.last.timings is None:
            raise RuntimeError("the decode leg ended without its counts")
        if not done.last.usage.transferred_bytes:
            raise RuntimeError("the KV was not pulled but computed again")
        seconds = (first_token - began, first_token - await computed, done.last.timings.transfer_s, used)
        return Taken(*(each * 1e3 for each in seconds))

    async def _computed(self, request_id: str) -> float:
        await self._prefill.ended(request_id)
        return time.perf_counter()

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._decoding)


@asynccontextmanager
async def engines(chunk: int, seed: int) -> AsyncIterator[Bench]:
    """Both engines with chunks of that many tokens."""
    engine = EngineSpec(max_num_batched_tokens=chunk, kv_cache_bytes=256 << 20, threads=1)
    deployment = Deployment(
        model=ModelSpec(),
        disaggregation="always",
        transfer=TransferSpec(overlap="always"),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        ),
    )
    path = str(resolve_model(deployment.model.source))
    prefill, decode = (VllmEngine(deployment, pool, model_path=path) for pool in deployment.pools)
    try:
        prefills = await start_bench(prefill, "prefill-0")
        others = set(psutil.Process().children(recursive=True))
        decodes = await start_bench(decode, "decode-0")
        decoding = [each for each in psutil.Process().children(recursive=True) if each not in others]
        yield Bench(prefills, decodes, decoding, seed)
    finally:
        await prefill.stop()
        await decode.stop()


def rows(chunk: int, length: int, measured: Pairs) -> list[Row]:
    """The figures of one length at one chunk size. The peer is the pull after computation."""
    what = f"{length} tokens in chunks of {chunk}"
    pull, _ = median([each.pull for each in measured.after])
    pairs = list(zip(measured.overlapped, measured.after, strict=True))
    saved, spread = median([after.ttft - overlapped.ttft for overlapped, after in pairs])
    return [
        _beside(f"TTFT, {what}", [(one.ttft, other.ttft) for one, other in pairs]),
        Row(f"TTFT saved, {what}", saved, "ms", "higher", spread=spread, note="pair by pair"),
        _beside(
            f"prefill's end to first token, {what}",
            [(one.tail, other.tail) for one, other in pairs],
            f"; its pull takes {pull:.1f} ms",
        ),
        _beside(f"CPU of the decode engine, {what}", [(one.cpu, other.cpu) for one, other in pairs]),
    ]


def _beside(name: str, pairs: list[tuple[float, float]], more: str = "") -> Row:
    value, spread = median([one for one, _ in pairs])
    peer, (least, most) = median([other for _, other in pairs])
    note = f"peer: {least:.1f} to {most:.1f} ms{more}"
    return Row(name, value, "ms", "lower", peer=peer, ratio=value / peer, spread=spread, note=note)


async def run(lengths: list[int], chunks: list[int], pairs: int) -> list[Row]:
    """All figures."""
    made: list[Row] = []
    for chunk in chunks:
        async with engines(chunk, seed=chunk) as bench:
            for length in lengths:
                made += rows(chunk, length, await bench.measure(length, pairs))
                for row in made[-4:]:
                    print(f"{row.name}: {row.value:.1f} ms, peer {row.peer or 0.0:.1f}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of prompts of each kind ({PAIRS})")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help=f"of prompts, in tokens {LENGTHS}"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=list(CHUNKS), help=f"tokens of a prefill step {CHUNKS}"
    )
    arguments = parser.parse_args()
    made = asyncio.run(run(arguments.lengths, arguments.chunks, arguments.pairs))
    print(write("overlap", "make bench-overlap", made))


if __name__ == "__main__":
    main()
