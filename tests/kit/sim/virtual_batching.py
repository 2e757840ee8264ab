"""Continuous batching in virtual time: what requests see of an engine under load.

Each step takes one token of every stream, then as many prompt tokens as `max_num_batched_tokens` leaves, in
the order of arrival, as vLLM schedules them. With engines apart, a prompt's last token is computed again by
the engine that decodes, once it has the KV. Routing, admission and preemption are not played: see
kvasir_platform.sim for whole deployments. It shares no code with that simulator but the performance model.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.performance.step import EngineModel, PromptChunk, StepWork


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request that arrives at `at_s` seconds, and its tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class VirtualOutcome:
    """Times of a request in seconds: its arrival, its first token and its last."""

    at_s: float
    first_s: float
    last_s: float
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.at_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens, 0 for a single token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class EnginesApart:
    """An engine that computes prompts, one that decodes, and what moving KV between them takes: `fixed_s` and
    `byte_s` for each byte. `together`: they share a device."""

    prefill: EngineModel
    decode: EngineModel
    fixed_s: float
    byte_s: float
    together: bool = False


@dataclass(slots=True)
class _Job:
    """A request on one engine: prompt tokens `left` to compute behind `done`, and `tokens` to give."""

    number: int
    done: int
    left: int
    tokens: int
    given: int = 0


class _VirtualEngine:
    """One engine: its batch, and the step that runs."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.stepping = False
        self._waiting: deque[_Job] = deque()
        self._prompts: list[_Job] = []
        self._streams: list[_Job] = []
        self._chunks: list[tuple[_Job, int]] = []

    @property
    def busy(self) -> bool:
        """Whether it has work, also between two steps."""
        return self.stepping or bool(self._waiting or self._prompts or self._streams)

    def add(self, job: _Job) -> None:
        self._waiting.append(job)

    def begin(self) -> float | None:
        """Begin a step. Return its seconds, None if there is nothing to do."""
        shape = self.model.shape
        budget = shape.max_num_batched_tokens - len(self._streams)
        while self._waiting and len(self._streams) + len(self._prompts) < shape.max_num_seqs:
            self._prompts.append(self._waiting.popleft())
        self._chunks = []
        for job in self._prompts:
            tokens = min(job.left, budget)
            if tokens <= 0:
                break
            self._chunks.append((job, tokens))
            budget -= tokens
        streams = len(self._streams)
        if not streams and not self._chunks:
            return None
        self.stepping = True
        context = sum(job.done for job in self._streams) / streams if streams else 0.0
        prompts = tuple(PromptChunk(n, job.done, last=n == job.left) for job, n in self._chunks)
        return self.model.step(StepWork(prompts, streams, context)).seconds

    def end(self) -> tuple[list[_Job], list[_Job]]:
        """End the step. Return the jobs that gave their first token, and those that gave their last."""
        self.stepping = False
        for job in self._streams:
            job.done += 1
            job.given += 1
        first = []
        for job, tokens in self._chunks:
            job.done += tokens
            job.left -= tokens
            if not job.left:
                job.given = 1
                first.append(job)
        self._prompts = [job for job in self._prompts if job.left]
        self._streams += first
        ended = [job for job in self._streams if job.given >= job.tokens]
        self._streams = [job for job in self._streams if job.given < job.tokens]
        return first, ended


class _Play:
    """One run: engines, the events to come, and what was seen."""

    def __init__(
        self, requests: Sequence[VirtualRequest], engines: EngineModel | EnginesApart, users: int
    ) -> None:
        self._requests = requests
        self._apart = engines if isinstance(engines, EnginesApart) else None
        self._first_engine = _VirtualEngine(engines.prefill if isinstance(engines, EnginesApart) else engines)
        self._last_engine = self._first_engine if self._apart is None else _VirtualEngine(self._apart.decode)
        self._events: list[tuple[float, int, _VirtualEngine, _Job | int | None]] = []
        self._order = itertools.count()
        self._began = [each.at_s for each in requests]
        self._first = [0.0] * len(requests)
        self._last = [0.0] * len(requests)
        self._next = users or len(requests)
        for number in range(min(self._next, len(requests))):
            self._at(requests[number].at_s, self._first_engine, number)

    def run(self) -> list[VirtualOutcome]:
        while self._events:
            now, _, engine, job = heapq.heappop(self._events)
            if isinstance(job, int):
                self._arrive(job, now)
            elif job is None:
                self._end(engine, now)
            else:
                engine.add(job)
            if not engine.stepping:
                self._begin(engine, now)
        return [
            VirtualOutcome(began, first, last, each.output_tokens)
            for each, began, first, last in zip(
                self._requests, self._began, self._first, self._last, strict=True
            )
        ]

    def _arrive(self, number: int, now: float) -> None:
        each = self._requests[number]
        self._began[number] = now
        cached = min(each.cached_tokens, each.prompt_tokens - 1)
        tokens = each.output_tokens if self._apart is None else 1
        job = _Job(number, cached, each.prompt_tokens - cached, tokens)
        self._at(now + self._request_s(self._first_engine), self._first_engine, job)

    def _begin(self, engine: _VirtualEngine, now: float) -> None:
        seconds = engine.begin()
        if seconds is None:
            return
        self._at(now + seconds * self._slower(engine), engine, None)

    def _request_s(self, engine: _VirtualEngine) -> float:
        """Return how long a request that arrives takes to its engine."""
        reached = engine.model.coefficients
        busy = engine.busy or (self._together and self._other(engine).busy)
        return (reached.busy_request_s or reached.request_s) if busy else reached.request_s

    def _slower(self, engine: _VirtualEngine) -> float:
        """Return how many times longer a step takes that begins while the other engine computes."""
        shares = self._together and self._other(engine).stepping
        return 1.0 + engine.model.coefficients.shared if shares else 1.0

    def _other(self, engine: _VirtualEngine) -> _VirtualEngine:
        return self._last_engine if engine is self._first_engine else self._first_engine

    @property
    def _together(self) -> bool:
        return self._apart is not None and self._apart.together

    def _end(self, engine: _VirtualEngine, now: float) -> None:
        first, ended = engine.end()
        if self._apart is not None and engine is self._first_engine:
            for job in ended:
                self._hand_over(self._apart, job, now)
            return
        for job in first:
            self._first[job.number] = now
        for job in ended:
            self._last[job.number] = now
            if self._next < len(self._requests):
                self._arrive(self._next, now)
                self._next += 1

    def _hand_over(self, apart: EnginesApart, job: _Job, now: float) -> None:
        each, decode = self._requests[job.number], self._last_engine.model
        moved = apart.fixed_s + decode.context_bytes(each.prompt_tokens) * apart.byte_s
        there = _Job(job.number, each.prompt_tokens - 1, 1, each.output_tokens)
        self._at(now + moved + self._request_s(self._last_engine), self._last_engine, there)

    def _at(self, when: float, engine: _VirtualEngine, job: _Job | int | None) -> None:
        """Let a job be with its engine, the request of that number arrive, or (None) a step end."""
        heapq.heappush(self._events, (when, next(self._order), engine, job))


def play(
    requests: Sequence[VirtualRequest], engines: EngineModel | EnginesApart, *, users: int = 0
) -> list[VirtualOutcome]:
    """Return what each request sees. With `users`, that many requests run at a time, each sent when one
    before it ends (a closed loop), and their `at_s` counts for the first ones only."""
    return _Play(requests, engines, users).run()
