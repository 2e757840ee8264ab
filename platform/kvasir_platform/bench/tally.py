"""Adds up what came of calls, in arrays of numbers: no prompt, no answer and no chunk is kept.

Gaps between chunks are counted in buckets half a percent wide, because a long run has hundreds of millions.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from itertools import pairwise

from kvasir_platform.bench.client.endpoint import CallResult

_GROWTH = 1.005
_LOG_GROWTH = math.log(_GROWTH)
_LEAST_S = 1e-6
_BUCKETS = 4_200
"""Up to 1,250 s."""
_MOST_KINDS = 50
UNFINISHED = "unfinished"


class GapCounts:
    """Gaps in seconds, to half a percent."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.count = 0
        self.total_s = 0.0
        self.longest_s = 0.0

    def add(self, gap_s: float) -> None:
        """Count one."""
        place = int(math.log(gap_s / _LEAST_S) / _LOG_GROWTH) if gap_s > _LEAST_S else 0
        self._counts[min(place, _BUCKETS - 1)] += 1
        self.count += 1
        self.total_s += gap_s
        self.longest_s = max(self.longest_s, gap_s)

    def quantile(self, q: float) -> float:
        """The middle of the bucket in which it lies; 0 without gaps."""
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return min(self.longest_s, _LEAST_S * math.pow(_GROWTH, place + 0.5))
        return 0.0


class BenchTally:
    """What came of the calls of one run. Times are seconds on one clock; `started`, `ended` and what is
    beside them have one value for each call that succeeded, in the order of their ends."""

    def __init__(self) -> None:
        self.lateness = array("d")
        self.started = array("d")
        self.ended = array("d")
        self.ttft = array("d")
        self.tpot = array("d")
        self.prompt_tokens = array("q")
        self.output_tokens = array("q")
        self.requested_prompt = array("q")
        self.requested_output = array("q")
        self.cached_tokens = 0
        self.gaps = GapCounts()
        self.errors: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.first_start = math.inf
        self.last_end = -math.inf
        self.sent = 0
        self.running = 0

    def begin(self, lateness_s: float) -> None:
        """A call is sent, this many seconds after it was due."""
        self.sent += 1
        self.running += 1
        self.lateness.append(lateness_s)

    def cut_off(self) -> None:
        """A call that was sent is given up, because the run ends."""
        self.running -= 1
        self.errors[UNFINISHED] += 1

    def end(self, result: CallResult, prompt_tokens: int, output_tokens: int) -> None:
        """A call that was sent has ended; the tokens are those asked for."""
        self.running -= 1
        self.first_start = min(self.first_start, result.started_s)
        self.last_end = max(self.last_end, result.ended_s)
        if result.error:
            kind = result.error if result.error in self.errors or len(self.errors) < _MOST_KINDS else "other"
            self.errors[kind] += 1
            self.details.setdefault(kind, result.detail)
            return
        chunks = result.chunks
        tokens = len(chunks) if result.output_tokens is None else result.output_tokens
        self.started.append(result.started_s)
        self.ended.append(result.ended_s)
        self.ttft.append(result.ttft_s)
        self.tpot.append((chunks[-1] - chunks[0]) / (tokens - 1) if chunks and tokens > 1 else math.nan)
        self.prompt_tokens.append(prompt_tokens if result.prompt_tokens is None else result.prompt_tokens)
        self.output_tokens.append(tokens)
        self.requested_prompt.append(prompt_tokens)
        self.requested_output.append(output_tokens)
        self.cached_tokens += result.cached_tokens or 0
        for before, after in pairwise(chunks):
            self.gaps.add(after - before)

    @property
    def succeeded(self) -> int:
        """Calls without an error."""
        return len(self.started)

    @property
    def failed(self) -> int:
        """Calls with an error, those given up included."""
        return sum(self.errors.values())
