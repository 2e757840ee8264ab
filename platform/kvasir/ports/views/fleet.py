"""What a router says of its workers, their links and prefixes, and of its queue."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.adapters import HeldAdapter
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvStatus
from kvasir.core.requests import EngineLoad, Role

HEALTH_STATES = ("healthy", "slow_start", "probing", "ejected", "unresponsive")
"""States of a HealthView, from best to worst."""


@dataclass(frozen=True, slots=True)
class HealthView:
    """The health of a worker. `state`: healthy, slow_start, ejected, probing, unresponsive; `reason` says why
    it is not healthy, `for_s` how long that lasts without further events (0: unknown). `share` is the
    fraction of its peers' load that it may receive, `ejections` the number of ejections. `panic`: the whole
    pool is used, because too many of its workers would be ejected."""

    state: str = "healthy"
    reason: str = ""
    for_s: float = 0.0
    share: float = 1.0
    ejections: int = 0
    panic: bool = False


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as seen by the router. `state`: connecting, ready, interrupted, draining, refused. `reason`
    says why it is not ready; `assigned` is a role that replaces that of its pool; `adapters` are those that
    it has loaded at run time."""

    worker_id: str
    address: str
    pool: str
    state: str
    reason: str = ""
    identity: WorkerIdentity | None = None
    load: EngineLoad | None = None
    in_flight: int = 0
    kv: KvStatus | None = None
    health: HealthView = HealthView()
    assigned: Role | None = None
    adapters: tuple[HeldAdapter, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that was loaded at run time and can be served. Requests name it to the router by `key`."""

    name: str
    model: str
    key: str


@dataclass(frozen=True, slots=True)
class BrownoutView:
    """The state of brown-out: the number of active steps, a text such as "2; cap_max_tokens=256; shed=batch"
    ("" for none), and the model that answers instead, if any."""

    level: int = 0
    text: str = ""
    fallback_model: str | None = None


NO_BROWNOUT = BrownoutView()


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The queue, pressure and brown-out of one model.

    `wait_s` is the expected wait of a typical request at the measured throughput of `tokens_per_s` (prompt
    and expected output; 0 until measured), `pressure` that wait divided by the promised TTFT. `parked`
    requests wait because no worker can serve them. `reserved_tokens` of `kv_tokens` are reserved on workers
    that decode.
    """

    queued: int = 0
    parked: int = 0
    wait_s: float = 0.0
    tokens_per_s: float = 0.0
    pressure: float = 0.0
    reserved_tokens: int = 0
    kv_tokens: int = 0
    brownout: BrownoutView = NO_BROWNOUT


@dataclass(frozen=True, slots=True)
class Accounting:
    """The requests of a router, and the work that it has accounted on workers. In a consistent state, every
    request either runs or waits, and work is accounted for exactly those that run. `leases` are held on
    prefill workers for KV that waits to be pulled."""

    in_flight: int
    running: int
    queued: int
    accounted: int
    leases: int

    @property
    def consistent(self) -> bool:
        """Whether the counts are consistent."""
        return self.running + self.queued == self.in_flight and self.accounted == self.running


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """The KV that workers received over one class of link: transfers, bytes, and the seconds that decode
    workers waited for it. The counts only grow."""

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, moved_bytes: int, seconds: float) -> LinkTransfers:
        """Return the counts with one more transfer."""
        return LinkTransfers(self.transfers + 1, self.bytes + moved_bytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of `blocks` blocks with which `prompts` cached prompts begin before they differ. `workers`
    hold its last block."""

    blocks: int
    prompts: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefixView:
    """The largest shared prefixes of one model, by the tokens that sharing saves. `blocks` were read, of
    `block_tokens` tokens each; `complete`: these are all that workers report."""

    model: str
    block_tokens: int
    blocks: int
    complete: bool
    prefixes: tuple[SharedPrefix, ...]
