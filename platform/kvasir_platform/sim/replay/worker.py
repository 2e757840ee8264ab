"""A simulated worker: continuous batching with chunked prefill, in closed form between events.

As in vLLM, every step gives each running stream one token and fills what is left of its token budget with
the oldest prompt that is not computed yet; prompts wait in the order of arrival, for those before them and
for memory. Steps are not run one by one. With `n` streams that read `kv` tokens and a chunk of `c` prompt
tokens from position `p`, `x` steps on, a step lasts

    step_fixed + step_stream n + step_kv_token (kv + n x) + c (prefill_token + prefill_context (p + c x))

which is linear in x: the time of x steps is a quadratic, and so is its inverse. What happens inside one step
is therefore placed within it, and not at its end.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import EngineLoad, Leg
from kvasir_platform.sim.replay.cache import BlockCache, Hit
from kvasir_platform.sim.replay.replica import SimReplica
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS
from kvasir_platform.workload.requests import WorkloadRequest

_NEVER = math.inf
# Of a step or a token: what is smaller counts as done.
_EPSILON = 1e-6
# Seconds: less than a virtual clock can distinguish after a day.
_INSTANT_S = 1e-9


@dataclass(slots=True, eq=False)
class Job:
    """One leg at one worker. Times are in virtual seconds; `started_s` is when it left the queue,
    `computed_s` when its whole prompt was there, and `first_s` when it produced a token; 0 for what has not
    happened. `load_s` is the time to load its blocks from CPU memory. `source` and `source_job` are what a
    decode leg pulls from."""

    number: int
    request: WorkloadRequest
    leg: Leg
    queued_s: float
    source: ReplayWorker | None = None
    source_job: Job | None = None
    started_s: float = 0.0
    computed_s: float = 0.0
    first_s: float = 0.0
    finished_s: float = 0.0
    hit: Hit = Hit(0, 0)
    private: int = 0
    load_s: float = 0.0
    moved_bytes: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached here."""
        return self.hit.blocks * TRACE_BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        """Tokens of the prompt and of the output generated here."""
        output = 1 if self.leg is Leg.PREFILL else self.request.output_tokens
        return -(-(self.request.prompt_tokens + output) // TRACE_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Happened:
    """The result of one event at a worker: legs whose prompt is computed (or pulled), and legs that ended."""

    computed: tuple[Job, ...] = ()
    ended: tuple[Job, ...] = ()


class ReplayWorker:
    """One replica. `advance(now)` must be called at `next_event_s`, and `submit` at any time before."""

    def __init__(self, worker_id: str, replica: SimReplica, cache: BlockCache) -> None:
        self.worker_id = worker_id
        self.cache = cache
        self._replica = replica
        self._now = 0.0  # time up to which the state is current
        self._queue: deque[Job] = deque()
        self._head: Job | None = None
        self._left = 0.0  # prompt tokens of the head
        self._position = 0.0
        self._loading = 0.0  # seconds until the head's blocks are loaded from CPU memory
        self._loads = self._loaded_blocks = 0
        self._loaded_s = 0.0
        self._steps = 0.0
        self._streams: list[tuple[float, int, Job]] = []  # by the step at which they end
        self._kv = 0.0
        self._pulls: list[tuple[float, int, Job]] = []  # by the time at which they end
        self._link_free_s = 0.0
        self._ended: list[Job] = []
        self.next_event_s = _NEVER
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self.busy_s = 0.0

    @property
    def load(self) -> EngineLoad:
        """The load that the worker reports."""
        running = len(self._streams) + len(self._pulls) + (self._head is not None)
        cpu = TierLoad(
            Medium.CPU,
            loads=self._loads,
            loaded_blocks=self._loaded_blocks,
            loaded_bytes=self._loaded_blocks * TRACE_BLOCK_TOKENS * self._replica.kv_token_bytes,
            load_s=self._loaded_s,
        )
        return EngineLoad(
            running=running,
            waiting=len(self._queue),
            kv_usage=self.cache.usage,
            kv_blocks_total=self._replica.device_blocks,
            tiers=(cpu,) if self._replica.cpu_blocks else (),
        )

    @property
    def work_s(self) -> float:
        """Seconds of work done, as if each request ran alone: prompt tokens computed, tokens generated."""
        return (
            self.prefilled_tokens * self._replica.prefill_token_s
            + self.generated_tokens * self._replica.step_stream_s
        )

    def submit(self, job: Job, now: float) -> None:
        """Accept a leg."""
        self._run_to(now)
        self._queue.append(job)
        self._admit()
        self._plan()

    def let_go(self, job: Job, now: float) -> None:
        """A prefill leg's blocks have been pulled."""
        self._run_to(now)
        self._release(job)
        self._admit()
        self._plan()

    def advance(self, now: float) -> Happened:
        """Advance to `now`, which is not beyond `next_event_s`."""
        self._run_to(now)
        computed: list[Job] = []
        ended: list[Job] = []
        head = self._head
        if head is not None and self._loading <= 0.0 and self._left <= _EPSILON:
            self._head = None
            computed.append(head)
            self._computed(head, ended)
        while self._pulls and self._pulls[0][0] <= now + _INSTANT_S:
            job = heappop(self._pulls)[2]
            computed.append(job)
            self._computed(job, ended)
        while self._streams and self._streams[0][0] <= self._steps + _EPSILON:
            job = heappop(self._streams)[2]
            self._kv -= job.request.prompt_tokens + job.request.output_tokens
            self._end(job, ended)
        self._admit()
        self._plan()
        return Happened(tuple(computed), tuple(ended))

    # -- legs ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start legs from the queue while there is room for them."""
        while self._queue and self._head is None:
            job = self._queue[0]
            request = job.request
            if len(self._streams) + len(self._pulls) >= self._replica.most_streams:
                return
            # Engines compute at least the last token of a prompt.
            hit = self.cache.lookup(request.names, (request.prompt_tokens - 1) // TRACE_BLOCK_TOKENS)
            if not self.cache.admit(request.names, hit, job.blocks):
                return
            self._queue.popleft()
            job.hit, job.started_s = hit, self._now
            job.private = job.blocks - hit.blocks
            if job.leg is Leg.DECODE:
                self._pull(job)
                continue
            self._head = job
            self._left = request.prompt_tokens - job.cached_tokens
            self._position = job.cached_tokens
            below = hit.from_cpu * TRACE_BLOCK_TOKENS * self._replica.kv_token_bytes
            self._loading = job.load_s = below * self._replica.cpu_byte_s
            if below:
                self._loads += 1
                self._loaded_blocks += hit.from_cpu
                self._loaded_s += job.load_s

    def _pull(self, job: Job) -> None:
        """Legs use the link one after the other."""
        tokens = job.request.prompt_tokens - job.cached_tokens
        job.moved_bytes = tokens * self._replica.kv_token_bytes
        begin = max(self._now, self._link_free_s)
        self._link_free_s = begin + job.moved_bytes * self._replica.transfer_byte_s
        heappush(self._pulls, (self._link_free_s + self._replica.transfer_fixed_s, job.number, job))

    def _computed(self, job: Job, ended: list[Job]) -> None:
        """The prompt is complete. Computing it produced the first token; after a pull that takes a step."""
        job.computed_s = job.first_s = self._now
        names = job.request.names
        job.private -= self.cache.fill(names[job.hit.blocks :])
        if job.leg is not Leg.DECODE:
            self.prefilled_tokens += job.request.prompt_tokens - job.cached_tokens
        if job.leg is Leg.PREFILL:
            job.finished_s = self._now
            ended.append(job)
            return
        remaining = job.request.output_tokens
        if job.leg is Leg.FULL:
            remaining -= 1
        else:
            job.first_s += self._pace()[0]
        self.generated_tokens += job.request.output_tokens
        if not remaining:
            self._end(job, ended)
            return
        self._kv += job.request.prompt_tokens + job.request.output_tokens - remaining
        heappush(self._streams, (self._steps + remaining, job.number, job))

    def _end(self, job: Job, ended: list[Job]) -> None:
        job.finished_s = self._now
        self._release(job)
        ended.append(job)

    def _release(self, job: Job) -> None:
        self.cache.release(job.request.names, job.private)

    # -- time ------------------------------------------------------------------------------------

    def _pace(self) -> tuple[float, float, int]:
        """The time of x steps is `a x + b x² / 2`; and the prompt tokens in each."""
        r, n = self._replica, len(self._streams)
        a = r.step_fixed_s + r.step_stream_s * n + r.step_kv_token_s * self._kv
        b = r.step_kv_token_s * n
        if self._head is None or self._loading > 0.0:
            return a, b, 0
        c = r.step_tokens - n
        a += c * (r.prefill_token_s + r.prefill_context_s * self._position)
        return a, b + r.prefill_context_s * c * c, c

    def _run_to(self, now: float) -> None:
        elapsed = now - self._now
        self._now = now
        if elapsed <= 0.0 or (self._head is None and not self._streams):
            return
        self.busy_s += elapsed
        a, b, chunk = self._pace()
        if self._head is not None and self._loading > 0.0:
            self._loading -= elapsed
            if self._loading <= _INSTANT_S:
                self._loading = 0.0
        steps = 2.0 * elapsed / (a + math.sqrt(a * a + 2.0 * b * elapsed))
        self._steps += steps
        self._kv += len(self._streams) * steps
        if chunk:
            self._left -= chunk * steps
            self._position += chunk * steps

    def _plan(self) -> None:
        """The time of the next change, if nothing arrives in between."""
        self.next_event_s = self._pulls[0][0] if self._pulls else _NEVER
        if self._head is None and not self._streams:
            return
        a, b, chunk = self._pace()
        steps = self._streams[0][0] - self._steps if self._streams else _NEVER
        if chunk:
            steps = min(steps, self._left / chunk)
        wait = max(0.0, a * steps + b * steps * steps / 2) if steps < _NEVER else _NEVER
        if self._head is not None and self._loading > 0.0:
            wait = min(wait, self._loading)
        self.next_event_s = min(self.next_event_s, self._now + wait)
