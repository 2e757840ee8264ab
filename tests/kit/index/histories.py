"""Histories of a router's index, its workers, and a transport that loses, repeats and reorders KV events.

Snapshots are taken while caches change, and workers and routers restart. At rest the router's view equals the
workers' caches. A failing history has a seed, which repeats it: `Random(seed)` decides everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from tests.kit.index.caches import (
    CHAIN,
    DEPTH,
    LEAVES,
    PATHS,
    Worker,
    depths,
    record,
)

from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, KvState, Medium
from kvasir.ports.routing import RoutingTarget
from kvasir_router.index import CancelSnapshot, CatchUpLimits, FetchSnapshot, FleetIndex, IndexMode

LIMITS = CatchUpLimits(
    pending_batches=4, pending_bytes=400, slice_blocks=4, backoff_min_s=0.05, backoff_max_s=0.4
)
TTL_S = 3.0
STEPS = 45
REORDERED, REPEATED, LOST = 0.06, 0.06, 0.08
"""Fates of a batch that is delivered."""


@dataclass
class Call:
    """One snapshot on its way: a walk through all that could be held."""

    fetch: FetchSnapshot
    epoch: int
    sequence: int
    todo: list[tuple[int, Medium, tuple[int, ...]]]


@dataclass
class Session:
    """What one router has with one worker. A snapshot mixes what was held at its sequence with what has
    changed since; with the batches up to `settled` it is what was held at one moment."""

    batches: list[KvBatch] = field(default_factory=list)
    call: Call | None = None
    wanted: FetchSnapshot | None = None
    settled: int = 0


class History:
    """One history, from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now = 0.0
        self.tight = rng.random() < 0.1
        self.workers: dict[str, Worker] = {}
        self.sessions: dict[str, Session] = {}
        self.live: list[tuple[RoutingTarget, int]] = []
        self.demoted: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        for number in range(rng.randrange(2, 4)):
            mode = rng.choice((IndexMode.HYBRID, IndexMode.REPORTED, IndexMode.REPORTED, IndexMode.PREDICTED))
            worker = Worker(f"w{number}", mode, rng.randrange(1, 3), rng.random() < 0.9)
            self.workers[worker.worker_id] = worker
        self.index = self.new_index()
        for worker_id in self.workers:
            if rng.random() < 0.8:
                self.join(worker_id)
        weights: list[tuple[int, Callable[[], None]]] = [
            (22, self.deliver),
            (14, self.change),
            (16, self.flush),
            (26, self.fetch),
            (8, self.pass_time),
            (4, self.predict),
            (3, self.end_prediction),
            (1, self.lose_track),
            (2, self.restore),
            (1, self.restart_worker),
            (1, self.rejoin),
            (1, self.demote),
        ]
        self.actions = [action for weight, action in weights for _ in range(weight)]

    def new_index(self) -> FleetIndex:
        return FleetIndex(
            capacity_blocks=14 if self.tight else 1000,
            predicted_blocks=6 if self.tight else 20,
            predicted_ttl_s=TTL_S,
            confirm_s=0.2,
            limits=LIMITS,
        )

    # -- the world -------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(STEPS):
            if self.rng.random() < 0.01:
                self.restart_router()
            self.rng.choice(self.actions)()
            self.perform()
            self.look()

    def a_session(self) -> tuple[Worker, Session] | None:
        if not self.sessions:
            return None
        worker_id = self.rng.choice(list(self.sessions))
        return self.workers[worker_id], self.sessions[worker_id]

    def change(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        roll = self.rng.random()
        if roll < 0.6:
            worker.store(self.rng)
        elif roll < 0.95:
            worker.evict(self.rng)
        else:
            worker.clear(self.rng)

    def flush(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        self.send(worker, worker.flush())

    def send(self, worker: Worker, batch: KvBatch | None) -> None:
        session = self.sessions.get(worker.worker_id)
        if session is not None and batch is not None:
            session.batches.append(batch)

    def deliver(self) -> None:
        found = self.a_session()
        if found is None or not found[1].batches:
            return
        worker, session = found
        fate = self.rng.random()
        at = self.rng.randrange(len(session.batches)) if fate < REORDERED else 0
        repeated = REORDERED <= fate < REORDERED + REPEATED
        batch = session.batches[at] if repeated else session.batches.pop(at)
        if fate >= 1.0 - LOST:
            self.faults["lost"] += 1
            return
        self.faults["reordered"] += at > 0
        self.faults["repeated"] += repeated
        self.apply(worker, batch)

    def apply(self, worker: Worker, batch: KvBatch) -> None:
        self.index.apply(worker.worker_id, batch, self.now)

    def fetch(self) -> None:
        """Snapshots get on: they begin, bring parts, end or break."""
        found = self.a_session()
        if found is not None:
            self.advance(*found, broken=self.rng.random() < 0.08)

    def advance(self, worker: Worker, session: Session, *, broken: bool) -> None:
        if session.call is None:
            self.answer(worker, session)
            return
        call, fetch = session.call, session.call.fetch
        if broken or not worker.complete or worker.epoch != call.epoch:
            session.call = None
            error = "cut" if self.rng.random() < 0.7 else None
            self.index.snapshot_ended(worker.worker_id, fetch.attempt, error, self.now)
            return
        if not call.todo:
            session.call = None
            self.index.snapshot_ended(worker.worker_id, fetch.attempt, None, self.now)
            return
        count = self.rng.randrange(10, 3 * len(PATHS))
        some, call.todo = call.todo[:count], call.todo[count:]
        log = b"".join(
            record(KvEventKind.STORED, medium, rank, [path])
            for rank, medium, path in some
            if path in worker.held[rank, medium]
        )
        session.settled = worker.sequence + bool(worker.log)
        part = KvSnapshotPart(call.epoch, call.sequence, log, not call.todo)
        self.index.snapshot_part(worker.worker_id, fetch.attempt, part, self.now)

    def answer(self, worker: Worker, session: Session) -> None:
        if session.wanted is None:
            return
        fetch, session.wanted = session.wanted, None
        if not worker.complete:
            self.index.snapshot_ended(worker.worker_id, fetch.attempt, "incomplete", self.now)
            return
        todo = [(rank, medium, path) for rank, medium in worker.places for path in PATHS]
        session.call = Call(fetch, worker.epoch, worker.sequence, todo)

    def pass_time(self) -> None:
        self.now += self.rng.choice((0.0, 0.001, 0.01, 0.1, 0.5))
        due = self.index.next_due()
        if due is not None and due <= self.now:
            self.tick()

    def tick(self) -> None:
        self.perform(self.index.tick(self.now))

    def perform(self, effects: list[FetchSnapshot | CancelSnapshot] | None = None) -> None:
        for effect in self.index.take_effects() if effects is None else effects:
            session = self.sessions.get(effect.worker_id)
            if session is not None:
                session.call = None
                session.wanted = effect if isinstance(effect, FetchSnapshot) else None

    def predict(self) -> None:
        target = RoutingTarget(f"w{self.rng.randrange(4)}", self.rng.randrange(3))
        chain = CHAIN[self.rng.choice(LEAVES)][: self.rng.randrange(DEPTH + 1)]
        handle = self.index.predict(target, chain, self.now)
        if handle:
            self.live.append((target, handle))

    def end_prediction(self) -> None:
        if self.live:
            target, handle = self.live.pop(self.rng.randrange(len(self.live)))
            if self.rng.random() < 0.6:
                self.index.settle(target, handle, self.now)
            else:
                self.index.forget(target, handle)

    def lose_track(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        if worker.complete:
            self.send(worker, worker.lose())

    def restore(self) -> None:
        self.rng.choice(list(self.workers.values())).restore(self.rng)

    def restart_worker(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        worker.begin()
        if worker.worker_id in self.sessions:
            self.join(worker.worker_id)

    def restart_router(self) -> None:
        self.index = self.new_index()
        self.live.clear()
        self.demoted.clear()
        for worker_id in list(self.sessions):
            self.join(worker_id)

    def rejoin(self) -> None:
        worker_id = self.rng.choice(list(self.workers))
        if worker_id in self.sessions:
            del self.sessions[worker_id]
            self.index.remove(worker_id)
        else:
            self.join(worker_id)

    def join(self, worker_id: str) -> None:
        self.sessions[worker_id] = Session()
        self.demoted.pop(worker_id, None)
        worker = self.workers[worker_id]
        self.index.add(worker_id, worker.identity, worker.mode, self.now)
        self.perform()

    def demote(self) -> None:
        if self.rng.random() < 0.3:
            worker_id = f"w{self.rng.randrange(4)}"
            self.index.demote(worker_id, "its error stays high", self.now)
            status = self.index.status(worker_id)
            if status is not None:
                self.demoted[worker_id] = status.epoch

    # -- what must hold --------------------------------------------------------------------------

    def look(self) -> None:
        """A decision in between: it never fails, and finds nothing that was not so."""
        leaf = self.rng.choice(LEAVES)
        found = self.index.match(CHAIN[leaf])
        for worker in self.workers.values():
            status = self.index.status(worker.worker_id)
            for rank in range(worker.ranks):
                row = found[self.index.group(RoutingTarget(worker.worker_id, rank))].tolist()
                if status is None:
                    assert row == [0, 0, 0, 0]
                    continue
                self.seen[status.state] += 1
                if status.state is KvState.EXACT:
                    if status.sequence < self.sessions[worker.worker_id].settled:
                        continue
                    truth = depths(worker.truth[status.epoch, status.sequence], rank, leaf)
                    if worker.mode is IndexMode.REPORTED:
                        assert row == truth, f"{worker.worker_id} {status}"
                    else:
                        assert all(a >= b for a, b in zip(row, truth, strict=True))
                elif worker.mode is IndexMode.REPORTED:
                    assert row == [0, 0, 0, 0], f"{worker.worker_id} {status}"

    def come_to_rest(self) -> None:
        """The transport heals, every worker knows what it holds and says one thing more."""
        for worker in self.workers.values():
            worker.restore(self.rng)
        for worker_id, session in self.sessions.items():
            for batch in session.batches:
                self.apply(self.workers[worker_id], batch)
            session.batches.clear()
            self.perform()
            final = self.workers[worker_id].flush()
            if final is not None:
                self.apply(self.workers[worker_id], final)
            self.perform()
        for _ in range(1000):
            for worker_id, session in self.sessions.items():
                if session.call is not None or session.wanted is not None:
                    self.advance(self.workers[worker_id], session, broken=False)
                    self.perform()
            due = self.index.next_due()
            if due is None and not any(s.call or s.wanted for s in self.sessions.values()):
                return
            if due is not None:
                self.now = max(self.now, due)
                self.tick()
        raise AssertionError("it never comes to rest")

    def check_rest(self) -> None:
        self.index.check_integrity()
        for worker in self.workers.values():
            status = self.index.status(worker.worker_id)
            if status is None:
                continue
            exact = status.state is KvState.EXACT
            believed = worker.reports and worker.mode is not IndexMode.PREDICTED
            # A demoted worker is believed again from its next epoch on.
            believed = believed and self.demoted.get(worker.worker_id) != status.epoch
            assert exact == believed or (self.tight and not exact), f"{worker.worker_id}: {status}"
            truth = worker.held if exact else {place: set() for place in worker.places}
            assert status.blocks == sum(map(len, truth.values()))
            assert status.predicted_blocks == 0
            for leaf in LEAVES:
                found = self.index.match(CHAIN[leaf])
                for rank in range(worker.ranks):
                    row = found[self.index.group(RoutingTarget(worker.worker_id, rank))]
                    assert row.tolist() == depths(truth, rank, leaf), f"{worker.worker_id}.{rank} {leaf}"

    def remove_all(self) -> None:
        for worker_id in list(self.sessions):
            self.index.remove(worker_id)
        while (due := self.index.next_due()) is not None:
            self.now = max(self.now, due)
            self.index.tick(self.now)
        stats = self.index.stats()
        left = (stats.blocks, stats.predicted_blocks, stats.names, stats.unswept, stats.groups)
        assert left == (0, 0, 0, 0, 1)
        self.index.check_integrity()


@dataclass(frozen=True, slots=True)
class Played:
    """What came of histories: how often a worker was seen in each state, the faults of the transport by kind,
    and what failed by seed."""

    seen: Counter[str]
    faults: Counter[str]
    failed: dict[int, str]

    @classmethod
    def sum(cls, parts: Iterable[Played]) -> Played:
        """Return what came of all parts."""
        whole = cls(Counter(), Counter(), {})
        for part in parts:
            whole.seen.update(part.seen)
            whole.faults.update(part.faults)
            whole.failed.update(part.failed)
        return whole


def play(seeds: range) -> Played:
    """Play these histories to their ends."""
    played = Played(Counter(), Counter(), {})
    for seed in seeds:
        history = History(seed)
        try:
            history.run()
            history.come_to_rest()
            history.check_rest()
            history.remove_all()
        # Whatever a history raises, its seed repeats it.
        except Exception as error:  # noqa: BLE001
            played.failed[seed] = repr(error)
        played.seen.update(history.seen)
        played.faults.update(history.faults)
    return played
