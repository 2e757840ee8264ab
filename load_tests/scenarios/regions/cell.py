"""A cell in virtual time: replicas that come and go, a queue of prompts, and streams.

A replica computes one prompt at a time, whole, during which its streams wait; otherwise all of its streams
advance together, one token per step. All times are those of the performance model. The number of replicas is
that of the production planner, which sees the cell through its own port and reports.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields

from kvasir.core.demand import DemandReport, Traffic, WorkerStats
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_router.regions.reports import ModelReport
from load_tests.scenarios.regions.world import SEATS, ReplicaTimes

POOL, SERVED = "workers", "model"
START_S = 120.0
READY, PREFILLED, STREAMED = range(3)

Push = Callable[[float, int, "SimCell", "CellReplica", int], None]


class Work:
    """A request. `first_s` and `ended_s` are times of its first and last token at the client; `cell` is where
    it runs, and `left` the output that it still needs, of a prompt of `prompt` tokens."""

    __slots__ = (
        "at_s",
        "cell",
        "ended_s",
        "entry",
        "first_s",
        "gate",
        "left",
        "metered",
        "network_s",
        "number",
        "outcome",
        "output",
        "prefill_s",
        "prompt",
        "replica",
        "resident",
        "tried",
        "v_end",
    )

    def __init__(
        self, number: int, at_s: float, entry: int, *, prompt: int, output: int, prefill_s: float
    ) -> None:
        self.number, self.at_s, self.entry = number, at_s, entry
        self.prompt, self.output, self.prefill_s = prompt, output, prefill_s
        self.left = output
        self.cell: SimCell | None = None
        self.replica: CellReplica | None = None
        self.first_s = self.ended_s = -1.0
        self.network_s = self.v_end = 0.0
        self.gate = entry
        self.resident = self.metered = False
        self.tried: frozenset[str] = frozenset()
        self.outcome = ""


class CellReplica:
    """One replica. `v` is the number of tokens that a stream present from the beginning has got: streams end
    at the `v` in `streams`. `version` makes earlier events of its streams void."""

    __slots__ = (
        "asked_s",
        "hits",
        "kv",
        "name",
        "prompt",
        "since_s",
        "state",
        "step_s",
        "streams",
        "v",
        "v_s",
        "version",
    )

    def __init__(self, name: str, now: float, step_s: float) -> None:
        self.name, self.asked_s, self.since_s = name, now, now
        self.state = ReplicaState.STARTING
        self.prompt: Work | None = None
        self.streams: list[tuple[float, int, Work]] = []
        self.kv = self.hits = self.version = 0
        self.v, self.v_s, self.step_s = 0.0, now, step_s

    def advance(self, now: float) -> None:
        """Let the streams advance, unless a prompt is computed."""
        if self.prompt is None:
            self.v += (now - self.v_s) / self.step_s
        self.v_s = now


class SimCell:
    """kvasir.ports.scaler.Scaler, and the cell's traffic. `push` makes an event, `ended` takes a request that
    has its output, at the time at which the cell has it."""

    def __init__(
        self, number: int, name: str, times: ReplicaTimes, push: Push, ended: Callable[[Work, float], None]
    ) -> None:
        self.number, self.name = number, name
        self.now = 0.0
        self.paid_s = 0.0
        self.epoch = ""
        self._times, self._push, self._ended = times, push, ended
        self._replicas: dict[str, CellReplica] = {}
        self._queue: deque[Work] = deque()
        self._queued_s = 0.0
        self._count = self._order = self._sequence = 0
        self._traffic = dict.fromkeys((each.name for each in fields(Traffic)), 0)
        self._measured_s = 0.0
        self._rate = 0.0

    # -- Scaler ------------------------------------------------------------------------------------

    def observe(self) -> Sequence[Replica]:
        """See Scaler."""
        return [
            Replica(each.name, POOL, each.state, each.since_s, each.name) for each in self._replicas.values()
        ]

    def start(self, pool: str, count: int) -> None:
        """See Scaler."""
        assert pool == POOL
        for _ in range(count):
            self._push(self.now + START_S, READY, self, self._made(), 0)

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        """See Scaler."""
        assert pool == POOL
        for name in replica_ids:
            replica = self._replicas.get(name)
            if replica is not None and replica.state is not ReplicaState.LEAVING:
                replica.state, replica.since_s = ReplicaState.LEAVING, self.now
                self._leave_if_done(replica)

    def serve(self, count: int) -> None:
        """Begin with that many serving replicas."""
        for _ in range(count):
            replica = self._made()
            replica.state = ReplicaState.SERVING

    def ready(self, replica: CellReplica) -> None:
        """A replica serves from now on, unless it has gone meanwhile."""
        if self._replicas.get(replica.name) is replica and replica.state is ReplicaState.STARTING:
            replica.state, replica.since_s = ReplicaState.SERVING, self.now
            self._begin()

    def crash(self) -> list[Work]:
        """Everything is lost; return the requests that were here."""
        lost = list(self._queue)
        for replica in self._replicas.values():
            replica.advance(self.now)
            self.paid_s += self.now - replica.asked_s
            if replica.prompt is not None:
                lost.append(replica.prompt)
            for _, _, work in replica.streams:
                self._count_output(work, replica)
                lost.append(work)
            # Events of its prompt and streams are void.
            replica.prompt, replica.streams = None, []
            replica.version += 1
        self._replicas.clear()
        self._queue.clear()
        self._queued_s = 0.0
        return lost

    def close(self) -> None:
        """The time of replicas that still exist is added."""
        for replica in self._replicas.values():
            self.paid_s += self.now - replica.asked_s
            replica.asked_s = self.now

    def _made(self) -> CellReplica:
        self._order += 1
        replica = CellReplica(f"{self.name}-{self._order}", self.now, self._times.fixed_s)
        self._replicas[replica.name] = replica
        return replica

    def _leave_if_done(self, replica: CellReplica) -> None:
        if replica.prompt is None and not replica.streams:
            self.paid_s += self.now - replica.asked_s
            del self._replicas[replica.name]

    # -- reports -----------------------------------------------------------------------------------

    def model_report(self, dollars_per_mtok: float) -> ModelReport:
        """Return what the cell reports of the model. A queue is as long as its prompts take on all replicas,
        and what they compute is half done on average."""
        serving = [each for each in self._replicas.values() if each.state is ReplicaState.SERVING]
        busy_s = [each.prompt.prefill_s for each in serving if each.prompt is not None]
        wait_s = 0.0
        if serving and len(busy_s) == len(serving):
            wait_s = (self._queued_s + sum(busy_s) / 2) / len(serving)
        free = sum(self._times.kv_tokens - each.kv for each in serving)
        return ModelReport(
            SERVED,
            "1",
            len(serving),
            wait_s,
            self._rate,
            max(0, free - self._queued_tokens()),
            dollars_per_mtok,
        )

    def _queued_tokens(self) -> int:
        return sum(work.prompt + work.left for work in self._queue)

    def demand(self) -> DemandReport:
        """The report of the cell's router to its planner."""
        self._sequence += 1
        traffic, times = self._traffic, self._times
        traffic["waiting"] = len(self._queue)
        traffic["waiting_tokens"] = sum(work.prompt for work in self._queue)
        running = sum(len(each.streams) + (each.prompt is not None) for each in self._replicas.values())
        traffic["in_flight"] = len(self._queue) + running
        done = traffic["computed_tokens"]
        token_s = self._measured_s / done if done else times.prefill_s[4] / times.prompts[4]
        workers = tuple(
            WorkerStats(
                worker_id=each.name,
                pool=POOL,
                role=Role.BOTH,
                serving=each.state is ReplicaState.SERVING,
                prefill_fixed_s=0.0,
                prefill_token_s=token_s,
                step_fixed_s=times.fixed_s,
                step_stream_s=times.stream_s
                + times.kv_token_s * (each.kv / len(each.streams) if each.streams else 0.0),
                hit_tokens=0,
                kv_tokens=times.kv_tokens,
                used_tokens=each.kv,
                streams=len(each.streams),
            )
            for each in self._replicas.values()
            if each.state is not ReplicaState.STARTING
        )
        return DemandReport("router", self.epoch, self._sequence, {SERVED: Traffic(**traffic)}, workers)

    @property
    def serving(self) -> int:
        """Replicas that serve."""
        return sum(each.state is ReplicaState.SERVING for each in self._replicas.values())

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Take a request."""
        self._traffic["arrived"] += 1
        self._traffic["arrived_tokens"] += work.prompt
        work.cell, work.replica = self, None
        self._queue.append(work)
        self._queued_s += work.prefill_s
        self._begin()

    def cancel(self, work: Work) -> None:
        """Stop a request that is here."""
        work.cell = None
        if work in self._queue:
            self._queue.remove(work)
            self._queued_s -= work.prefill_s
            return
        replica = work.replica
        assert replica is not None
        if replica.prompt is work:
            # The step that computes it is not interrupted; its stream never begins.
            return
        replica.advance(self.now)
        self._count_output(work, replica)
        replica.streams = [each for each in replica.streams if each[2] is not work]
        heapq.heapify(replica.streams)
        replica.kv -= work.prompt + work.left
        self._renew(replica)

    def _count_output(self, work: Work, replica: CellReplica) -> None:
        """What was generated so far is part of the prompt when the request goes on."""
        done = max(0, min(work.left - 1, int(work.left - (work.v_end - replica.v))))
        work.prompt, work.left = work.prompt + done, work.left - done

    def _begin(self) -> None:
        """Let replicas that are free compute the first prompts of the queue."""
        queue = self._queue
        while queue:
            work = queue[0]
            need, best, fewest = work.prompt + work.left, None, SEATS
            for each in self._replicas.values():
                if (
                    each.prompt is None
                    and each.state is ReplicaState.SERVING
                    and len(each.streams) < fewest
                    and each.kv + need <= self._times.kv_tokens
                ):
                    best, fewest = each, len(each.streams)
            if best is None:
                return
            queue.popleft()
            self._queued_s -= work.prefill_s
            best.advance(self.now)
            best.prompt, work.replica = work, best
            best.kv += need
            best.version += 1
            self._push(self.now + work.prefill_s, PREFILLED, self, best, work.number)

    def prefilled(self, replica: CellReplica) -> None:
        """A prompt is computed."""
        work = replica.prompt
        assert work is not None
        replica.prompt, replica.v_s = None, self.now
        self._measured_s += work.prefill_s
        rate = work.prompt / work.prefill_s
        self._rate += 0.02 * (rate - self._rate) if self._rate else rate
        if work.cell is self and work.replica is replica:
            self._stream(replica, work)
        else:
            replica.kv -= work.prompt + work.left
            self._renew(replica)
        self._begin()
        if replica.state is ReplicaState.LEAVING:
            self._leave_if_done(replica)

    def _stream(self, replica: CellReplica, work: Work) -> None:
        traffic = self._traffic
        traffic["prompt_tokens"] += work.prompt
        traffic["computed_tokens"] += work.prompt
        traffic["computed_squares"] += work.prompt**2
        self._count += 1
        work.v_end = replica.v + work.left
        heapq.heappush(replica.streams, (work.v_end, self._count, work))
        self._renew(replica)
        if work.first_s < 0:
            work.first_s = self.now + replica.step_s + work.network_s

    def _renew(self, replica: CellReplica) -> None:
        replica.step_s = self._times.step_s(len(replica.streams), replica.kv)
        replica.version += 1
        if replica.streams and replica.prompt is None:
            left = max(0.0, replica.streams[0][0] - replica.v)
            self._push(self.now + left * replica.step_s, STREAMED, self, replica, replica.version)

    def streamed(self, replica: CellReplica) -> None:
        """A stream has its last token."""
        replica.advance(self.now)
        _, _, work = heapq.heappop(replica.streams)
        replica.kv -= work.prompt + work.left
        self._renew(replica)
        work.cell = work.replica = None
        traffic = self._traffic
        traffic["ended"] += 1
        traffic["output_tokens"] += work.left
        self._ended(work, self.now)
        self._begin()
        if replica.state is ReplicaState.LEAVING:
            self._leave_if_done(replica)

    def judged(self, met: bool) -> None:
        """A request that ran here met its SLO class, or did not."""
        self._traffic["judged"] += 1
        self._traffic["met"] += met
