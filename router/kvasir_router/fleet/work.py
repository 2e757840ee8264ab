"""Workers as the router keeps them, and what it has put on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import TierLoad
from kvasir.core.requests import EngineLoad, Role, Sampling
from kvasir.ports.routing import RoutingTarget


class WorkerState(StrEnum):
    """Whether new work may be sent."""

    READY = "ready"
    INTERRUPTED = "interrupted"
    DRAINING = "draining"


@dataclass(slots=True)
class TargetLoad:
    """What is accounted at one target: prompt tokens to prefill and the requests that they belong to,
    streams to decode, KV tokens. `mark` is the reading of the place's count of computed prompt tokens when
    this prompt was done."""

    prefill_tokens: int = 0
    waiting: int = 0
    streams: int = 0
    kv_tokens: int = 0
    mark: int = field(default=0, compare=False)

    def add(self, other: TargetLoad, sign: int = 1) -> None:
        """Add, or with sign -1 take away."""
        self.prefill_tokens += sign * other.prefill_tokens
        self.waiting += sign * other.waiting
        self.streams += sign * other.streams
        self.kv_tokens += sign * other.kv_tokens

    def at_most(self, other: TargetLoad) -> None:
        """Cut down to what `other` has."""
        self.prefill_tokens = min(self.prefill_tokens, other.prefill_tokens)
        self.waiting = min(self.waiting, other.waiting)
        self.streams = min(self.streams, other.streams)
        self.kv_tokens = min(self.kv_tokens, other.kv_tokens)

    @property
    def nothing(self) -> bool:
        """Whether none of it is left."""
        return not (self.prefill_tokens or self.waiting or self.streams or self.kv_tokens)

    def copy(self) -> TargetLoad:
        """As much again, without the mark."""
        return TargetLoad(self.prefill_tokens, self.waiting, self.streams, self.kv_tokens)

    def prompt(self) -> TargetLoad:
        """The part of it that is over once the prompt is computed, where the request stays."""
        return TargetLoad(prefill_tokens=self.prefill_tokens, waiting=self.waiting)


Charges = dict[RoutingTarget, TargetLoad]


def runs_whole(sampling: Sampling) -> bool:
    """Whether a request has to run on one worker: a hand-off feeds one sequence, and what the prompt's tokens
    were worth is told by whoever computes them."""
    return sampling.n > 1 or sampling.prompt_logprobs is not None


@dataclass(slots=True)
class Worker:
    """One worker's session. `legs` maps what runs there to requests; `ghosts` are aborted legs whose
    last delta has not come, with the time of the abort. `reported` is the worker's last word on itself,
    `tiers` its last on those. `foreign` is the number of requests there that are not ours,
    `foreign_waiting` those of them that have not begun. `charged` counts our requests that run there or are
    to. `assigned` is a role that it is given in place of its own, `draining` says why it takes nothing new,
    "" if it does. The fleet keeps columns of all this: tell it of every change but of legs."""

    worker_id: str
    identity: WorkerIdentity
    assigned: Role | None = None
    interrupted: bool = False
    draining: str = ""
    legs: dict[str, str] = field(default_factory=dict)
    ghosts: dict[str, float] = field(default_factory=dict)
    reported: EngineLoad | None = None
    tiers: tuple[TierLoad, ...] = ()
    foreign: int = 0
    foreign_waiting: int = 0
    own_at_report: int = 0
    charged: int = 0

    @property
    def role(self) -> Role:
        """The part of the work that it is given."""
        return self.identity.role if self.assigned is None else self.assigned

    @property
    def state(self) -> WorkerState:
        """Whether new work may be sent."""
        if self.interrupted:
            return WorkerState.INTERRUPTED
        return WorkerState.DRAINING if self.draining else WorkerState.READY

    @property
    def load(self) -> EngineLoad | None:
        """What it has reported, with the last word on tiers; made anew by each call."""
        return None if self.reported is None else replace(self.reported, tiers=self.tiers)

    def free_leg_id(self, request_id: str, attempt: int) -> str:
        """A name for a leg of the request that no other has here; of its first attempt, the request's own."""
        leg_id = f"{request_id}~{attempt}" if attempt else request_id
        while leg_id in self.legs or leg_id in self.ghosts:
            leg_id += "~"
        return leg_id

    def abandon(self, leg_id: str, now: float) -> None:
        """The leg is no longer ours, and will still say its last."""
        del self.legs[leg_id]
        self.ghosts[leg_id] = now

    def forget_ghosts(self, before: float) -> None:
        """Give up on legs that were aborted until `before` and never said their last."""
        for leg_id in [leg_id for leg_id, since in self.ghosts.items() if since <= before]:
            del self.ghosts[leg_id]

    def report(self, load: EngineLoad) -> None:
        """Take in a load that was measured by the worker. What it says nothing of, tiers, is as before."""
        self.reported = load
        self.tiers = load.tiers or self.tiers
        self.own_at_report = len(self.legs) + len(self.ghosts)
        self.foreign = max(0, load.running + load.waiting - self.own_at_report)
        self.foreign_waiting = min(self.foreign, load.waiting)
