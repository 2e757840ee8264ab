"""A sink that records what an engine delivers and checks it against the obligations of the engine port.

Contract tests, simulations and fault tests use the same sink, so that a violation is found wherever it
occurs. A sink must not raise, so violations are collected in `violations`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, fields

from kvasir.core.requests import (
    Delta,
    EngineLoad,
    FinishReason,
    KvHandoff,
    PositionLogprobs,
    StepBatch,
    Usage,
)

_GAUGES = frozenset({"running", "waiting", "kv_usage", "kv_blocks_total", "kv_blocks_leased"})
_COUNTERS = tuple(f.name for f in fields(EngineLoad) if f.name not in _GAUGES | {"tiers"})


@dataclass(slots=True)
class Choice:
    """One choice as it was delivered. `taken` counts the characters of its text that a parser consumed, None
    without a parser; `calls` has a call's id, name and arguments by its number."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    taken: int | None = None
    reasoning_tokens: int = 0
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class Recorded:
    """One request as it was delivered. `last` is its last delta, `offered` the latest hand-off, and
    `first_usage` the usage of its first delta."""

    choices: dict[int, Choice] = field(default_factory=dict)
    deltas: int = 0
    last: Delta | None = None
    offered: KvHandoff | None = None
    first_usage: Usage | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def choice(self, index: int = 0) -> Choice:
        """Return a choice; create it on first use."""
        return self.choices.setdefault(index, Choice())


class DeltaRecorder:
    """A StepSink. Request ids must not be used twice, except for ones refused as duplicates."""

    def __init__(self) -> None:
        self.batches = 0
        self.requests: dict[str, Recorded] = {}
        self.duplicates: list[Delta] = []
        self.violations: list[str] = []
        self._load: EngineLoad | None = None

    def __call__(self, batch: StepBatch) -> None:
        self.batches += 1
        if batch.load is not None:
            self.observe_load(batch.load)
        for delta in batch.deltas:
            self._take(delta)

    def request(self, request_id: str) -> Recorded:
        """Return the recorded request; create it on first use."""
        return self.requests.setdefault(request_id, Recorded())

    async def wait(self, request_id: str) -> Recorded:
        """Return when the last delta of a request has arrived."""
        recorded = self.request(request_id)
        await recorded.ended.wait()
        return recorded

    async def wait_for_first(self, request_id: str) -> Recorded:
        """Return when any delta of a request has arrived."""
        recorded = self.request(request_id)
        await recorded.began.wait()
        return recorded

    def observe_load(self, load: EngineLoad) -> None:
        """Check that counters only grow and fractions are between 0 and 1."""
        if not 0.0 <= load.kv_usage <= 1.0:
            self.violations.append(f"kv_usage {load.kv_usage} is no fraction")
        if self._load is not None:
            for name in _COUNTERS:
                if getattr(load, name) < getattr(self._load, name):
                    self.violations.append(f"load.{name} shrank")
        self._load = load

    def _take(self, delta: Delta) -> None:
        if delta.error == "duplicate_request":
            self.duplicates.append(delta)
            return
        recorded = self.request(delta.request_id)
        choice = recorded.choice(delta.index)
        recorded.deltas += 1
        recorded.offered = delta.handoff or recorded.offered
        recorded.began.set()
        if recorded.last is not None:
            self._violated(delta, "a delta after the last one")
        if choice.finish is not None:
            self._violated(delta, f"choice {delta.index} goes on after its end")
        if delta.offset != len(choice.tokens):
            self._violated(delta, f"offset {delta.offset}, expected {len(choice.tokens)}")
        if (delta.finish is FinishReason.ERROR) != (delta.error is not None):
            self._violated(delta, "finish=ERROR and error come together")
        self._take_usage(recorded, delta)
        if delta.logprobs and len(delta.logprobs) != len(delta.token_ids):
            self._violated(delta, "logprobs and tokens differ in number")
        choice.tokens.extend(delta.token_ids)
        choice.text += delta.text
        self._take_parts(recorded, choice, delta)
        choice.logprobs.extend(delta.logprobs)
        choice.finish = delta.finish
        choice.stop_reason = delta.stop_reason
        if delta.last:
            if delta.finish is None:
                self._violated(delta, "the last delta has no finish reason")
            recorded.last = delta
            recorded.ended.set()

    def _take_usage(self, recorded: Recorded, delta: Delta) -> None:
        if delta.last and delta.usage is None:
            self._violated(delta, "the last delta has no usage")
        if delta.usage is not None and not delta.last:
            if recorded.deltas > 1:
                self._violated(delta, "usage comes with the first and the last delta only")
            recorded.first_usage = delta.usage

    def _take_parts(self, recorded: Recorded, choice: Choice, delta: Delta) -> None:
        if delta.prompt_logprobs:
            if recorded.deltas > 1:
                self._violated(delta, "the prompt's logprobs come with the first delta")
            recorded.prompt_logprobs = delta.prompt_logprobs
        if delta.raw_length is None:
            if delta.reasoning or delta.tool_calls:
                self._violated(delta, "parts without parsing")
            return
        choice.taken = (choice.taken or 0) + delta.raw_length
        choice.reasoning += delta.reasoning
        choice.reasoning_tokens = delta.reasoning_tokens
        for piece in delta.tool_calls:
            call = choice.calls.setdefault(piece.index, ["", "", ""])
            if bool(piece.call_id) != bool(piece.name) or (call[0] and piece.call_id):
                self._violated(delta, f"call {piece.index} is named once, together with its id")
            for at, value in enumerate((piece.call_id, piece.name, piece.arguments)):
                call[at] += value
        if list(choice.calls) != list(range(len(choice.calls))):
            self._violated(delta, f"calls are numbered {list(choice.calls)}")

    def _violated(self, delta: Delta, what: str) -> None:
        self.violations.append(f"{delta.request_id}: {what}")


class FullRecorder(DeltaRecorder):
    """Records every delta as well, and after each the number of tokens and characters of the request's first
    choice. `merged` counts the batches in which a stream has tokens of more than one step: vLLM's client
    takes outputs that wait for it without yielding to the loop, so that steps are merged where this process
    lags."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = 0
        self.deltas: dict[str, list[Delta]] = {}
        self.after: dict[str, list[tuple[int, int]]] = {}

    def __call__(self, batch: StepBatch) -> None:
        tokens: Counter[str] = Counter()
        for delta in batch.deltas:
            tokens[delta.request_id] += len(delta.token_ids)
        self.merged += any(count > 1 for count in tokens.values())
        super().__call__(batch)

    def _take(self, delta: Delta) -> None:
        super()._take(delta)
        self.deltas.setdefault(delta.request_id, []).append(delta)
        received = self.request(delta.request_id).choice()
        self.after.setdefault(delta.request_id, []).append((len(received.tokens), len(received.text)))
