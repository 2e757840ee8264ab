"""The measurements of `kvasir calibrate` on a running deployment, which goes on serving its other clients.

Times are the server's own (Server-Timing), from the arrival of a request at the gateway, so that neither the
network nor this process counts. Prompts are random tokens, so that nothing of them is in a cache. Each figure
is a median, because other clients and the system disturb single ones.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvasir.performance.step import PromptChunk
from kvasir_platform.calibrate.design import CalibrationDesign
from kvasir_platform.calibrate.samples import (
    BusySample,
    CalibrationSamples,
    TransferTimes,
    burst_sample,
    decode_sample,
    hand_over_sample,
    mixed_sample,
    prefill_sample,
    slowed_by,
)
from kvasir_platform.cli.calibrate.client import TimedStream, mean_itl_s

_MOST_THREADS = 512
"""Requests at a time; loads of more are left out."""
_DISTINCT = 512
"""Words in the text whose tokens prompts are made of."""


class LoadClient(Protocol):
    """What an experiment needs of a client."""

    def tokenize(self, text: str) -> tuple[list[int], int]:
        """Return the tokens of `text`, and the most of a request."""
        ...

    def timed(self, prompt: Sequence[int], max_tokens: int) -> TimedStream:
        """Stream a completion of exactly `max_tokens` tokens, and time it."""
        ...


class Experiment:
    """Runs the loads of `plan` through `client`. `budget` is the most tokens of a step of the engine that
    computes prompts; `apart`: another engine decodes. `workers` are how many compute prompts and how many
    decode: loads of several requests are sent for each of them, in the expectation that the router spreads
    them evenly. `step(text)` is told what is measured. Methods raise UpstreamError."""

    def __init__(
        self,
        client: LoadClient,
        plan: CalibrationDesign,
        *,
        budget: int,
        apart: bool,
        workers: tuple[int, int] = (1, 1),
        rng: random.Random,
        step: Callable[[str], None],
    ) -> None:
        self._client = client
        self._plan = plan
        self._budget = budget
        self._prefillers, self._decoders = workers
        self._rng = rng
        self._step = step
        self._samples = CalibrationSamples(apart)
        text = " ".join(str(rng.randrange(1000)) for _ in range(_DISTINCT))
        self._tokens = sorted(set(client.tokenize(text)[0]))

    def run(self) -> CalibrationSamples:
        """Run all loads."""
        self._step("warming up")
        for length in (64, self._plan.prompts[-1]):
            self._client.timed(self._prompt(length), 8)
        for length in self._plan.prompts:
            self._step(f"prompts of {length:,} tokens")
            self._prompts(length)
        for length in self._plan.cached:
            self._step(f"prompts of which {length:,} tokens are cached")
            self._cached(length)
        for streams, context in self._plan.streams:
            if streams * self._decoders > _MOST_THREADS:
                continue
            self._step(f"{streams} streams of {context:,} tokens")
            self._streams(streams, context)
        for prompts in self._plan.bursts:
            if prompts * self._prefillers > _MOST_THREADS:
                continue
            self._step(f"{prompts} prompts at once")
            self._burst(prompts)
        if self._prefillers == self._decoders == 1:
            self._side_by_side()
        return self._samples

    def _side_by_side(self) -> None:
        for number in range(self._plan.repeats):
            self._step(f"prompts beside streams, {number + 1} of {self._plan.repeats}")
            self._beside()
            if self._samples.apart:
                self._both_busy()

    def _prompts(self, length: int) -> None:
        found = [self._client.timed(self._prompt(length), 2) for _ in range(self._plan.repeats)]
        seconds = statistics.median(map(self._prefill_s, found))
        self._samples.prefill.append(prefill_sample(length, 0, seconds, budget=self._budget))
        self._hand_overs(length, found)

    def _cached(self, length: int) -> None:
        prefix = self._prompt(length)
        self._client.timed(prefix, 2)
        more = self._plan.uncached_tokens
        found = [self._client.timed([*prefix, *self._prompt(more)], 2) for _ in range(self._plan.repeats)]
        cached = int(statistics.median(each.cached_tokens for each in found))
        seconds = statistics.median(map(self._prefill_s, found))
        self._samples.prefill.append(prefill_sample(length + more, cached, seconds, budget=self._budget))

    def _hand_overs(self, length: int, found: Sequence[TimedStream]) -> None:
        if not self._samples.apart:
            return
        waits = [_hand_over_s(each) for each in found]
        self._samples.decode.append(hand_over_sample(length, max(1e-6, statistics.median(waits))))
        moved = [each for each in found if each.moved_bytes]
        if moved:
            seconds = statistics.median(each.server["transfer"] for each in moved)
            self._samples.transfers.append(TransferTimes(moved[0].moved_bytes, seconds))

    def _streams(self, streams: int, context: int) -> None:
        itl = mean_itl_s(self._together(streams * self._decoders, context, self._plan.output_tokens))
        if itl:
            middle = context + self._plan.output_tokens / 2
            self._samples.decode.append(decode_sample(streams, middle, itl))

    def _burst(self, prompts: int) -> None:
        length, last = self._plan.burst_tokens, []
        for _ in range(self._plan.repeats):
            found = self._together(prompts * self._prefillers, length, 1)
            began = min(each.began_s for each in found)
            last.append(max(each.began_s + self._prefill_s(each) for each in found) - began)
        seconds = statistics.median(last)
        self._samples.prefill.append(burst_sample(prompts, length, seconds, budget=self._budget))

    def _beside(self) -> None:
        """Run streams and, one after the other, prompts at the same time. On one engine they share steps; of
        engines apart, each may slow the other."""
        plan = self._plan
        tokens = 2 * plan.output_tokens
        alone = [self._one(plan.beside_tokens) for _ in range(plan.repeats)]
        alone_itl = mean_itl_s(self._together(plan.beside, plan.burst_tokens, tokens))
        with ThreadPoolExecutor(1) as threads:
            streams = threads.submit(self._together, plan.beside, plan.burst_tokens, tokens)
            during, short = [self._one(plan.beside_tokens)], [self._one(plan.burst_tokens)]
            while not streams.done():
                during.append(self._one(plan.beside_tokens))
                short.append(self._one(plan.burst_tokens))
            decoded = streams.result()
        begins, ends = _window(decoded)
        context = plan.burst_tokens + tokens / 2
        short = [each for each in short if begins <= each.began_s <= ends]
        self._samples.prefill_busy += [
            BusySample(PromptChunk(plan.burst_tokens), plan.beside, context, self._prefill_s(each))
            for each in short
        ]
        inside = [each for each in during if begins <= each.began_s <= ends]
        itl = mean_itl_s(decoded)
        if not inside or not itl or not alone_itl:
            return
        if not self._samples.apart:
            each_token = itl / (ends - begins)
            prompts = {plan.burst_tokens: len(short) * each_token}
            prompts[plan.beside_tokens] = prompts.get(plan.beside_tokens, 0.0) + len(inside) * each_token
            self._samples.decode.append(mixed_sample(plan.beside, context, prompts, itl))
            return
        slower = statistics.median(map(self._prefill_s, inside)) / statistics.median(
            map(self._prefill_s, alone)
        )
        self._samples.prefill_slowed.append(max(0.0, slower - 1.0))
        busy_s = sum(map(self._prefill_s, [*inside, *short]))
        self._samples.decode_slowed.append(slowed_by(itl, alone_itl, busy_s / (ends - begins)))

    def _both_busy(self) -> None:
        """Hand requests over while both of two engines compute: streams, and prompts of two clients."""
        plan = self._plan
        tokens = 2 * plan.output_tokens
        with ThreadPoolExecutor(3) as threads:
            streams = threads.submit(self._together, plan.beside, plan.burst_tokens, tokens)

            def prompts(length: int) -> list[TimedStream]:
                found = [self._one(length)]
                while not streams.done():
                    found.append(self._one(length))
                return found

            lengths = (plan.beside_tokens, plan.burst_tokens)
            sent = [threads.submit(prompts, length) for length in lengths]
            begins, ends = _window(streams.result())
            for length, each in zip(lengths, sent, strict=True):
                self._samples.decode_busy += [
                    BusySample(
                        PromptChunk(1, length - 1),
                        plan.beside,
                        plan.burst_tokens + tokens / 2,
                        _hand_over_s(found),
                    )
                    for found in each.result()
                    if begins <= found.began_s <= ends
                ]

    def _one(self, length: int) -> TimedStream:
        return self._client.timed(self._prompt(length), 1)

    def _together(self, streams: int, length: int, tokens: int) -> list[TimedStream]:
        prompts = [self._prompt(length) for _ in range(streams)]
        with ThreadPoolExecutor(streams) as threads:
            return list(threads.map(lambda prompt: self._client.timed(prompt, tokens), prompts))

    def _prefill_s(self, found: TimedStream) -> float:
        return found.server.get("prefill", found.ttft_s) if self._samples.apart else found.ttft_s

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.choice(self._tokens) for _ in range(length)]


def _hand_over_s(found: TimedStream) -> float:
    """Return the seconds from the end of the prefill to the first token, without the transfer."""
    return found.ttft_s - found.server.get("prefill", 0.0) - found.server.get("transfer", 0.0)


def _window(found: Sequence[TimedStream]) -> tuple[float, float]:
    """Return when the last stream had begun and the first ended."""
    return max(each.times_s[0] for each in found), min(each.times_s[-1] for each in found)
