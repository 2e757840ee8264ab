"""The performance model as the simulated engine asks it: millions of times, for steps that differ little.

The time of a decode step is, for a number of streams, piecewise linear in their mean context, up to windows
of attention. Between two powers of two it is taken from the line through both ends, and kept. A line lets the
engine run many equal steps at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvasir.performance.step import EngineModel, PromptChunk, StepWork
from kvasir_platform.sim.engine.options import BatchOptions

_FIRST = 8
_MOST_LINES = 1 << 16


class DecodeLine(NamedTuple):
    """A decode step at a mean context of c tokens takes `at_zero + slope * c` seconds, below `until`."""

    at_zero: float
    slope: float
    until: float


class StepCosts:
    """Times of steps of one engine, in seconds. A draft model's time is added to steps with streams."""

    def __init__(self, model: EngineModel, options: BatchOptions) -> None:
        self._model = model
        self._lookahead = options.lookahead
        self._draft = 0.0 if options.speculation is None else options.speculation.draft_cost
        self._lines: dict[tuple[int, int], DecodeLine] = {}

    def line(self, streams: int, context: float) -> DecodeLine:
        """Return the line on which decode steps of `streams` streams lie from that mean context on."""
        power = max(_FIRST, int(context).bit_length())
        known = self._lines.get((streams, power))
        if known is not None:
            return known
        high = float(1 << power)
        low = 0.0 if power == _FIRST else high / 2
        first, last = self._decode(streams, low), self._decode(streams, high)
        slope = (last - first) / (high - low)
        if len(self._lines) >= _MOST_LINES:
            self._lines.clear()
        found = self._lines[streams, power] = DecodeLine(first - slope * low, slope, high)
        return found

    def prompts(self, chunks: Sequence[PromptChunk], streams: int, context: float) -> float:
        """Return the time of a step that computes `chunks` beside `streams` streams."""
        work = StepWork(tuple(chunks), streams, context, self._lookahead if streams else 0)
        seconds = self._model.step(work).seconds
        return seconds + self._drafts(streams, context) if streams else seconds

    def _decode(self, streams: int, context: float) -> float:
        step = self._model.decode(streams, context, lookahead=self._lookahead).seconds
        return step + self._drafts(streams, context)

    def _drafts(self, streams: int, context: float) -> float:
        if not self._draft:
            return 0.0
        return self._lookahead * self._draft * self._model.decode(streams, context).seconds
