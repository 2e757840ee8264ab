"""Workers as the router sees them, and the work that it has put on them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import TierLoad
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.media.prompts import kinds_of
from kvasir.core.requests import EngineLoad, Request, Role, Sampling
from kvasir.ports.routing import RoutingTarget


class WorkerState(StrEnum):
    """Whether new work may be sent."""

    READY = "ready"
    INTERRUPTED = "interrupted"
    DRAINING = "draining"


@dataclass(slots=True, init=False)
class TargetLoad:
    """Work accounted at one target: prompt tokens to prefill and their requests, streams to decode, KV
    tokens. `mark` is the place's count of computed prompt tokens when this prompt was done."""

    prefill_tokens: int
    waiting: int
    streams: int
    kv_tokens: int
    mark: int = field(init=False, compare=False)

    def __init__(
        self, prefill_tokens: int = 0, waiting: int = 0, streams: int = 0, kv_tokens: int = 0
    ) -> None:
        self.prefill_tokens = prefill_tokens
        self.waiting = waiting
        self.streams = streams
        self.kv_tokens = kv_tokens
        self.mark = 0

    def add(self, other: TargetLoad, sign: int = 1) -> None:
        """Add, or with sign -1 subtract."""
        self.prefill_tokens += sign * other.prefill_tokens
        self.waiting += sign * other.waiting
        self.streams += sign * other.streams
        self.kv_tokens += sign * other.kv_tokens

    def at_most(self, other: TargetLoad) -> None:
        """Reduce each number to at most that of `other`."""
        self.prefill_tokens = min(self.prefill_tokens, other.prefill_tokens)
        self.waiting = min(self.waiting, other.waiting)
        self.streams = min(self.streams, other.streams)
        self.kv_tokens = min(self.kv_tokens, other.kv_tokens)

    @property
    def nothing(self) -> bool:
        """Whether all numbers are zero."""
        return not (self.prefill_tokens or self.waiting or self.streams or self.kv_tokens)

    def copy(self) -> TargetLoad:
        """Return a copy without the mark."""
        return TargetLoad(self.prefill_tokens, self.waiting, self.streams, self.kv_tokens)

    def prompt(self) -> TargetLoad:
        """Return the part that ends when the prompt is computed and the request stays."""
        return TargetLoad(prefill_tokens=self.prefill_tokens, waiting=self.waiting)


Charges = dict[RoutingTarget, TargetLoad]


def runs_whole(sampling: Sampling) -> bool:
    """Whether a request has to run on one worker: a hand-off feeds one sequence, and the worker that computes
    the prompt reports its logprobs."""
    return sampling.n > 1 or sampling.prompt_logprobs is not None


@dataclass(slots=True)
class Worker:
    """One worker's session. `legs` maps what runs there to requests; `ghosts` are aborted legs whose last
    delta has not come, with the time of the abort. `reported` is the worker's last load, `tiers` and `gpus`
    their last state. `foreign` is the number of requests of other routers there, `foreign_waiting` those of
    them that have not started. `charged` counts our requests that run there or will. `assigned` is a role
    that replaces its own; `draining` says why it takes no new work, "" if it does. `adapters` are the keys of
    those that it has loaded at run time. The fleet keeps columns of all this: report every change to it,
    except of legs."""

    worker_id: str
    identity: WorkerIdentity
    assigned: Role | None = None
    interrupted: bool = False
    draining: str = ""
    legs: dict[str, str] = field(default_factory=dict)
    ghosts: dict[str, float] = field(default_factory=dict)
    reported: EngineLoad | None = None
    tiers: tuple[TierLoad, ...] = ()
    gpus: tuple[GpuLoad, ...] = ()
    foreign: int = 0
    foreign_waiting: int = 0
    own_at_report: int = 0
    charged: int = 0
    adapters: frozenset[str] = frozenset()

    def has(self, adapter: str | None) -> bool:
        """Whether requests with this adapter, None for the model alone, can run there."""
        return adapter is None or adapter in self.adapters or adapter in self.identity.adapters

    def takes(self, request: Request) -> bool:
        """Whether the request can run there, as far as its adapter and its media are concerned."""
        return self.has(request.adapter) and (
            not request.media or kinds_of(request.media) <= self.identity.media_kinds
        )

    @property
    def role(self) -> Role:
        """The role in use."""
        return self.identity.role if self.assigned is None else self.assigned

    @property
    def any_role(self) -> bool:
        """Whether it can run whole requests."""
        return self.identity.any_role or self.role is not Role.PREFILL

    @property
    def state(self) -> WorkerState:
        """Whether new work may be sent."""
        if self.interrupted:
            return WorkerState.INTERRUPTED
        return WorkerState.DRAINING if self.draining else WorkerState.READY

    @property
    def load(self) -> EngineLoad | None:
        """The reported load with the last state of tiers and GPUs."""
        reported = self.reported
        if reported is None or (reported.tiers is self.tiers and reported.gpus is self.gpus):
            return reported
        return replace(reported, tiers=self.tiers, gpus=self.gpus)

    def free_leg_id(self, request_id: str, attempt: int) -> str:
        """Return an unused name for a leg of the request; the request's own for its first attempt."""
        leg_id = f"{request_id}~{attempt}" if attempt else request_id
        while leg_id in self.legs or leg_id in self.ghosts:
            leg_id += "~"
        return leg_id

    def abandon(self, leg_id: str, now: float) -> None:
        """The leg is aborted, and its last delta is still to come."""
        del self.legs[leg_id]
        self.ghosts[leg_id] = now

    def forget_ghosts(self, before: float) -> None:
        """Drop legs that were aborted until `before` and whose last delta never came."""
        for leg_id in [leg_id for leg_id, since in self.ghosts.items() if since <= before]:
            del self.ghosts[leg_id]

    def report(self, load: EngineLoad) -> None:
        """Store a load that the worker measured. Tiers and GPUs that it leaves out keep their state."""
        self.reported = load
        self.tiers = load.tiers or self.tiers
        self.gpus = load.gpus or self.gpus
        self.own_at_report = len(self.legs) + len(self.ghosts)
        self.foreign = max(0, load.running + load.waiting - self.own_at_report)
        self.foreign_waiting = min(self.foreign, load.waiting)


class PromptBlocks(NamedTuple):
    """The names of a prompt's whole blocks, their size in tokens (0: unknown), and the output that is
    expected of the request."""

    names: array[int]
    block_size: int
    expected_tokens: int
