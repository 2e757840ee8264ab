"""A prefill and a decode pool of changing size in virtual time, request by request.

A prompt is computed by one replica, alone and whole, in the order of arrival; its answer is generated on the
decode replica with the fewest streams that has room for its KV. All streams of a replica advance together,
one token per step, and steps take longer with more streams and more KV. Replicas take time to start and drain
before they leave, and all of that time is counted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from kvasir.core.demand import DemandReport, Traffic, WorkerStats
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.sim.scaling.days import RequestShape

READY, PREFILLED, STREAMED = range(3)
_HAND_OVER_S = 0.05


@dataclass(frozen=True, slots=True)
class Kind:
    """The performance of every replica. Seconds; tokens of KV. The starts of `never_ready` replicas, counted
    in the order of requests, never finish."""

    prefill_fixed_s: float
    prefill_token_s: float
    prefill_context_s: float
    step_fixed_s: float
    step_stream_s: float
    step_kv_token_s: float
    kv_tokens: int
    most_streams: int
    start_s: float
    never_ready: frozenset[int] = frozenset()

    def prefill_s(self, shape: RequestShape) -> float:
        """Seconds to compute a prompt."""
        known = shape.prompt - shape.computed
        attention = self.prefill_context_s * (shape.prompt**2 - known**2) / 2
        return self.prefill_fixed_s + shape.computed * self.prefill_token_s + attention


@dataclass(frozen=True, slots=True)
class SimSlo:
    """The SLO, in seconds."""

    ttft_s: float
    itl_s: float


class _Worker:
    """One replica. `v` is the number of tokens that a stream present from the beginning has got: streams end
    at the `v` in `ends`."""

    __slots__ = (
        "asked_s",
        "busy",
        "ends",
        "hits",
        "kv",
        "name",
        "order",
        "pool",
        "role",
        "since_s",
        "state",
        "step_s",
        "v",
        "v_s",
        "version",
    )

    def __init__(self, order: int, pool: str, role: Role, now: float, step_s: float) -> None:
        self.name, self.order, self.pool, self.role = f"{pool}-{order}", order, pool, role
        self.state, self.since_s, self.asked_s = ReplicaState.STARTING, now, now
        self.busy = False
        self.ends: list[tuple[float, int, float, float, int, int]] = []
        self.kv = self.hits = 0
        self.v, self.v_s, self.step_s = 0.0, now, step_s
        self.version = 0


@dataclass(slots=True)
class RecentFigures:
    """Figures since the last reading, for simple rules."""

    ttfts: list[float] = field(default_factory=list)


class ScaledFleet:
    """kvasir.ports.scaler.Scaler, and the traffic. `pools` are a prefill and a decode pool by name, with the
    replicas that serve at the start."""

    def __init__(
        self,
        kind: Kind,
        level: SimSlo,
        pools: dict[str, tuple[Role, int]],
        times: Iterable[float],
        shapes: Sequence[RequestShape],
    ) -> None:
        self.now = 0.0
        self.paid_s = 0.0
        self.judged = self.met = self.most = 0
        self.starts = self.turns = 0
        self.recent = RecentFigures()
        self.model, self.epoch = "model", ""
        self._kind, self._level = kind, level
        self._roles = {name: role for name, (role, _) in pools.items()}
        self._times = [*times, float("inf")]
        self._shapes = shapes
        self._next = 0
        self._events: list[tuple[float, int, int, _Worker, tuple[float, RequestShape] | int]] = []
        self._count = 0
        self._workers: dict[str, _Worker] = {}
        self._idle: list[_Worker] = []
        self._prompts: deque[tuple[float, RequestShape]] = deque()
        self._waiting_tokens = 0
        self._streams: deque[tuple[float, RequestShape]] = deque()
        self._decoders: list[_Worker] = []
        self._traffic = dict.fromkeys((each.name for each in fields(Traffic)), 0)
        self._sequence = 0
        self._asked = 0
        for name, (_, count) in pools.items():
            for worker in self._make(name, count):
                self._serve(worker)

    # -- Scaler ----------------------------------------------------------------------------------

    def observe(self) -> Sequence[Replica]:
        """See Scaler."""
        return [
            Replica(each.name, each.pool, each.state, each.since_s, each.name)
            for each in self._workers.values()
        ]

    def start(self, pool: str, count: int) -> None:
        """See Scaler."""
        if pool not in self._roles:
            raise ConfigError(f"there is no pool {pool}; there are {', '.join(self._roles)}")
        for worker in self._make(pool, count):
            self.starts += 1
            if worker.order not in self._kind.never_ready:
                self._push(self.now + self._kind.start_s, READY, worker, 0)

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        """See Scaler."""
        for name in replica_ids:
            worker = self._workers.get(name)
            if worker is None or worker.pool != pool or worker.state is ReplicaState.LEAVING:
                continue
            self._shelve(worker)
            worker.state, worker.since_s = ReplicaState.LEAVING, self.now
            self._end_if_done(worker)

    # -- routers ---------------------------------------------------------------------------------

    def assign(self, roles: dict[str, Role]) -> None:
        """Assign workers the role of the other pool, by name; all others have their pool's role. Running work
        ends where it is."""
        for worker in list(self._workers.values()):
            role = roles.get(worker.name, self._roles[worker.pool])
            if role is worker.role:
                continue
            self.turns += 1
            self._shelve(worker)
            worker.role = role
            if worker.state is ReplicaState.SERVING:
                self._offer(worker)

    def report(self) -> DemandReport:
        """The report of one router that handles all of the traffic."""
        self._sequence += 1
        self._traffic["waiting"] = len(self._prompts) + len(self._streams)
        self._traffic["waiting_tokens"] = self._waiting_tokens
        serving = [each for each in self._workers.values() if each.state is ReplicaState.SERVING]
        self._traffic["parked"] = 0 if serving else len(self._prompts)
        self._traffic["in_flight"] = (
            len(self._prompts)
            + len(self._streams)
            + sum(len(each.ends) + each.busy for each in self._workers.values())
        )
        kind = self._kind
        return DemandReport(
            "router",
            self.epoch,
            self._sequence,
            {self.model: Traffic(**self._traffic)},
            tuple(
                WorkerStats(
                    worker_id=each.name,
                    pool=each.pool,
                    role=each.role,
                    serving=each.state is ReplicaState.SERVING,
                    prefill_fixed_s=kind.prefill_fixed_s,
                    prefill_token_s=self._token_s(),
                    step_fixed_s=kind.step_fixed_s,
                    step_stream_s=self._stream_s(each),
                    hit_tokens=each.hits,
                    kv_tokens=kind.kv_tokens,
                    used_tokens=each.kv,
                    streams=len(each.ends),
                )
                for each in self._workers.values()
                if each.state is not ReplicaState.STARTING
            ),
        )

    def _token_s(self) -> float:
        """Seconds per computed token, attention included: the mean so far."""
        done = self._traffic["computed_tokens"]
        return self._measured_s / done if done else self._kind.prefill_token_s

    def _stream_s(self, worker: _Worker) -> float:
        streams = len(worker.ends)
        kv = self._kind.step_kv_token_s * (worker.kv / streams if streams else 0.0)
        return self._kind.step_stream_s + kv

    # -- what simple rules look at ---------------------------------------------------------------

    def serving(self, pool: str) -> list[str]:
        """The names of the serving replicas."""
        return [
            each.name
            for each in self._workers.values()
            if each.pool == pool and each.state is ReplicaState.SERVING
        ]

    def size(self, pool: str) -> int:
        """Replicas that serve or start."""
        return sum(
            each.pool == pool and each.state is not ReplicaState.LEAVING for each in self._workers.values()
        )

    def queued(self, role: Role) -> int:
        """Requests that wait for, or run in, this role."""
        busy = sum(each.busy for each in self._workers.values())
        streams = sum(len(each.ends) for each in self._workers.values())
        return len(self._prompts) + busy if role is Role.PREFILL else len(self._streams) + streams

    def busy(self, role: Role) -> float:
        """The utilization of the pool's workers in time, or in seats."""
        own = [w for w in self._workers.values() if w.role is role and w.state is ReplicaState.SERVING]
        if not own:
            return 1.0
        if role is Role.PREFILL:
            return sum(each.busy for each in own) / len(own)
        taken = sum(max(len(w.ends) / self._kind.most_streams, w.kv / self._kind.kv_tokens) for w in own)
        return taken / len(own)

    # -- time ------------------------------------------------------------------------------------

    _measured_s = 0.0

    def run(self, until: float) -> None:
        """Advance the time."""
        events, times = self._events, self._times
        while True:
            at = times[self._next]
            if events and events[0][0] <= at:
                if events[0][0] > until:
                    break
                self.now, kind, _, worker, what = heapq.heappop(events)
                if kind == STREAMED:
                    if what == worker.version:
                        self._streamed(worker)
                elif kind == PREFILLED:
                    self._prefilled(worker, what)  # type: ignore[arg-type]
                elif worker.state is ReplicaState.STARTING:
                    self._serve(worker)
                continue
            if at > until:
                break
            self.now = at
            shape = self._shapes[self._next]
            self._next += 1
            traffic = self._traffic
            traffic["arrived"] += 1
            traffic["arrived_tokens"] += shape.prompt
            self._waiting_tokens += shape.prompt
            self._prompts.append((at, shape))
            if self._idle:
                self._begin(self._idle.pop())
        self.now = until

    def end(self) -> None:
        """The time of replicas that still exist is added; requests that were not served count as missed."""
        for worker in self._workers.values():
            self.paid_s += self.now - worker.asked_s
            worker.asked_s = self.now
        late = sum(self.now - at > self._level.ttft_s for at, _ in (*self._prompts, *self._streams))
        self.judged += late

    def _push(self, at: float, kind: int, worker: _Worker, what: tuple[float, RequestShape] | int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, kind, self._count, worker, what))

    def _make(self, pool: str, count: int) -> list[_Worker]:
        made = []
        for _ in range(count):
            self._asked += 1
            worker = _Worker(self._asked, pool, self._roles[pool], self.now, self._kind.step_fixed_s)
            self._workers[worker.name] = worker
            made.append(worker)
        self.most = max(self.most, len(self._workers))
        return made

    def _serve(self, worker: _Worker) -> None:
        worker.state, worker.since_s = ReplicaState.SERVING, self.now
        self._offer(worker)

    def _offer(self, worker: _Worker) -> None:
        """The replica accepts new work of its role."""
        if worker.role is Role.DECODE:
            self._decoders.append(worker)
            while self._streams and self._place(*self._streams[0]):
                self._streams.popleft()
        elif not worker.busy and not worker.ends:
            self._free(worker)

    def _free(self, worker: _Worker) -> None:
        if self._prompts:
            self._begin(worker)
        else:
            self._idle.append(worker)

    def _shelve(self, worker: _Worker) -> None:
        """The replica accepts nothing new."""
        if worker in self._decoders:
            self._decoders.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)

    def _end_if_done(self, worker: _Worker) -> None:
        if not worker.busy and not worker.ends:
            self.paid_s += self.now - worker.asked_s
            del self._workers[worker.name]

    # -- prompts ---------------------------------------------------------------------------------

    def _begin(self, worker: _Worker) -> None:
        prompt = self._prompts.popleft()
        self._waiting_tokens -= prompt[1].prompt
        worker.busy = True
        self._push(self.now + self._kind.prefill_s(prompt[1]), PREFILLED, worker, prompt)

    def _prefilled(self, worker: _Worker, prompt: tuple[float, RequestShape]) -> None:
        worker.busy = False
        at, shape = prompt
        worker.hits += shape.prompt - shape.computed
        self._measured_s += self._kind.prefill_s(shape) - self._kind.prefill_fixed_s
        traffic = self._traffic
        traffic["ended"] += 1
        traffic["prompt_tokens"] += shape.prompt
        traffic["computed_tokens"] += shape.computed
        traffic["computed_squares"] += shape.computed**2
        traffic["output_tokens"] += shape.output
        if self._streams or not self._place(at, shape):
            self._streams.append(prompt)
        if worker.state is ReplicaState.LEAVING:
            self._end_if_done(worker)
        elif worker.role is Role.PREFILL and not worker.ends:
            self._free(worker)

    # -- streams ---------------------------------------------------------------------------------

    def _place(self, at: float, shape: RequestShape) -> bool:
        need = shape.prompt + shape.output
        kind, best, fewest = self._kind, None, self._kind.most_streams
        for worker in self._decoders:
            streams = len(worker.ends)
            if streams < fewest and worker.kv + need <= kind.kv_tokens:
                best, fewest = worker, streams
        if best is None:
            return False
        self._advance(best)
        first_s = self.now + _HAND_OVER_S + best.step_s
        self._count += 1
        heapq.heappush(best.ends, (best.v + shape.output, self._count, at, first_s, shape.output, need))
        best.kv += need
        self._renew(best)
        return True

    def _advance(self, worker: _Worker) -> None:
        worker.v += (self.now - worker.v_s) / worker.step_s
        worker.v_s = self.now

    def _renew(self, worker: _Worker) -> None:
        kind = self._kind
        worker.step_s = (
            kind.step_fixed_s + kind.step_stream_s * len(worker.ends) + kind.step_kv_token_s * worker.kv
        )
        worker.version += 1
        if worker.ends:
            left = max(0.0, worker.ends[0][0] - worker.v)
            self._push(self.now + left * worker.step_s, STREAMED, worker, worker.version)

    def _streamed(self, worker: _Worker) -> None:
        self._advance(worker)
        _, _, at, first_s, output, need = heapq.heappop(worker.ends)
        worker.kv -= need
        self._renew(worker)
        ttft_s = first_s - at
        itl_s = (self.now - first_s) / (output - 1) if output > 1 else 0.0
        late = ttft_s > self._level.ttft_s
        met = not late and itl_s <= self._level.itl_s
        self.judged += 1
        self.met += met
        self.recent.ttfts.append(ttft_s)
        traffic = self._traffic
        traffic["judged"] += 1
        traffic["met"] += met
        while self._streams and self._place(*self._streams[0]):
            self._streams.popleft()
        if worker.state is ReplicaState.LEAVING:
            self._end_if_done(worker)
        elif worker.role is Role.PREFILL and not worker.ends and not worker.busy:
            self._free(worker)
