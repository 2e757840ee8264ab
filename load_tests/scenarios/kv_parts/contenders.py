"""Everything that moves a case's bytes behind one interface, so that contenders run in turn in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from kvasir_workers.transfer.nixl.landing import BATCH_BYTES
from load_tests.scenarios.kv_parts.memory import Case, Run, runs_of
from load_tests.scenarios.kv_parts.remote import CPU, Remote

SOURCE_SEED = 1
TARGET_SEED = 2
GB = 1e9


class Contender(Protocol):
    """One way to move bytes."""

    name: str

    def prepare(self, case: Case) -> bool:
        """Prepare a case; return False if the contender does not support it."""
        ...

    def run(self) -> float:
        """Move the case once; return the seconds."""
        ...

    def check(self) -> None:
        """Raise if the received bytes differ from those sent."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        ...


@dataclass(slots=True)
class Samples:
    """Times of one contender and one case."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def rates(self, case: Case) -> list[float]:
        """GB/s of each round."""
        return [case.total / GB / seconds for seconds in self.seconds]

    def cpu_per_gb(self, case: Case) -> float:
        """CPU seconds per GB, over all rounds."""
        return self.cpu_s / (len(self.seconds) * case.total / GB)


def take_turns(
    contenders: Sequence[Contender], case: Case, rounds: int, say: Callable[[str], None]
) -> dict[str, Samples]:
    """Warm up and verify each contender with the case, then run all in turn for `rounds` rounds, each
    beginning with a different one."""
    ready = [contender for contender in contenders if contender.prepare(case)]
    for contender in ready:
        contender.run()
        contender.check()
    found = {contender.name: Samples() for contender in ready}
    for turn in range(rounds):
        first = turn % len(ready)
        for contender in ready[first:] + ready[:first]:
            before = contender.cpu_s()
            found[contender.name].seconds.append(contender.run())
            found[contender.name].cpu_s += contender.cpu_s() - before
    for name, samples in found.items():
        best = max(samples.rates(case))
        say(f"{case.name}: {name}: best {best:.2f} GB/s, {samples.cpu_per_gb(case):.2f} CPU s/GB")
    return found


class _Pair:
    """Two processes."""

    def __init__(self, name: str, stack: ExitStack, source: Remote, sink: Remote) -> None:
        self.name = name
        self._source, self._sink = source, sink
        for remote in (source, sink):
            stack.callback(remote.end)

    def cpu_s(self) -> float:
        """See Contender."""
        return float(self._source.call(CPU)) + float(self._sink.call(CPU))


class Adapter(_Pair):
    """One of our adapters. `nap_s`: interval between two polls; 0 polls in a busy loop."""

    def __init__(
        self, name: str, stack: ExitStack, kind: str, *, checksum: bool, nap_s: float, env: dict[str, str]
    ) -> None:
        where = "load_tests.scenarios.kv_parts.adapters"
        super().__init__(
            name,
            stack,
            Remote(f"{where}:Source", "source", kind, checksum, env=env),
            Remote(f"{where}:Sink", "sink", kind, checksum, env=env),
        )
        self._nap_s = nap_s
        self._count = 0

    def prepare(self, case: Case) -> bool:
        """See Contender."""
        self._source.call("prepare", case, SOURCE_SEED)
        self._sink.call("prepare", case)
        self._from, self._to = case.ids(SOURCE_SEED), case.ids(TARGET_SEED)
        return True

    def run(self) -> float:
        """See Contender. The time is that of the offer and then of the pull: both sides' sums are in it."""
        self._count += 1
        lease = f"lease-{self._count}"
        offer, offered_s = self._source.call("offer", lease, self._from)
        pulled_s = float(self._sink.call("pull", offer, self._to, self._nap_s))
        self._source.call("settle", lease, 0.0002)
        return float(offered_s) + pulled_s

    def check(self) -> None:
        """See Contender."""
        if self._source.call("digest", self._from) != self._sink.call("digest", self._to):
            raise RuntimeError(f"{self.name}: other bytes arrived")


class BareNixl(_Pair):
    """NIXL alone. `merged`: one descriptor per run of adjacent blocks, as in our adapter. Otherwise one per
    piece, and only in cases with many pieces."""

    def __init__(self, name: str, stack: ExitStack, *, merged: bool, env: dict[str, str]) -> None:
        where = "load_tests.peers.kv_nixl"
        super().__init__(
            name,
            stack,
            Remote(f"{where}:Source", "bare-source", env=env),
            Remote(f"{where}:Sink", "bare-sink", env=env),
        )
        self._merged = merged
        self._runs: list[Run] = []

    def prepare(self, case: Case) -> bool:
        """See Contender."""
        if not self._merged and (not case.small or case.scattered):
            return False
        named = self._source.call("prepare", case, SOURCE_SEED)
        self._sink.call("prepare", case, *named)
        self._from, self._to = case.ids(SOURCE_SEED), case.ids(TARGET_SEED)
        longest = max(1, BATCH_BYTES // case.piece) if self._merged else 1
        self._runs = runs_of(self._from, self._to, longest)
        return True

    def run(self) -> float:
        """See Contender."""
        return float(self._sink.call("read", self._runs))

    def check(self) -> None:
        """See Contender."""
        if self._source.call("digest", self._from) != self._sink.call("digest", self._to):
            raise RuntimeError(f"{self.name}: other bytes arrived")


class RawTcp(_Pair):
    """Sockets alone."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        where = "load_tests.peers.kv_tcp"
        super().__init__(name, stack, Remote(f"{where}:Source"), Remote(f"{where}:Sink"))

    def prepare(self, case: Case) -> bool:
        """See Contender."""
        port = self._source.call("prepare", case, SOURCE_SEED)
        self._source.begin("accept")
        self._sink.call("prepare", case, port)
        self._source.result()
        return True

    def run(self) -> float:
        """See Contender."""
        self._source.begin("send")
        seconds = float(self._sink.call("receive"))
        self._source.result()
        return seconds

    def check(self) -> None:
        """See Contender."""
        if self._source.call("first_and_last") != self._sink.call("first_and_last"):
            raise RuntimeError(f"{self.name}: other bytes arrived")


class Memcpy:
    """memcpy in one process, between two memories."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self._process = Remote("load_tests.peers.kv_memcpy:Copy")
        stack.callback(self._process.end)

    def prepare(self, case: Case) -> bool:
        """See Contender."""
        self._process.call("prepare", case, SOURCE_SEED)
        self._runs = runs_of(case.ids(SOURCE_SEED), case.ids(TARGET_SEED), case.pool)
        return True

    def run(self) -> float:
        """See Contender."""
        return float(self._process.call("copy", self._runs))

    def check(self) -> None:
        """See Contender. memcpy is not verified."""

    def cpu_s(self) -> float:
        """See Contender."""
        return float(self._process.call(CPU))


class TierTurn:
    """One direction, `store` or `load`, of a tier in the process `tier`. `server`: the separate process that
    stores its blobs, if any."""

    def __init__(self, name: str, tier: Remote, direction: str, server: int | None = None) -> None:
        self.name = name
        self._tier = tier
        self._direction = direction
        self._server = None if server is None else psutil.Process(server)

    def prepare(self, case: Case) -> bool:
        """See Contender."""
        self._tier.call("prepare", case, SOURCE_SEED)
        return True

    def run(self) -> float:
        """See Contender."""
        return float(self._tier.call(self._direction))

    def check(self) -> None:
        """See Contender. A store is verified by loading."""
        if self._direction == "load":
            self._tier.call("check")

    def cpu_s(self) -> float:
        """See Contender."""
        served = 0.0
        if self._server is not None:
            times = self._server.cpu_times()
            served = times.user + times.system
        return float(self._tier.call(CPU)) + served
