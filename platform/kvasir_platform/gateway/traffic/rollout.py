"""The course of a rollout as a pure function of its counts and the time.

    idle ──start──▶ running ──last step──▶ promoted ──undo──▶ rolled_back
                     │   ▲                                        ▲
                pause│   │start     worse, or abort               │
                     ▼   │ ───────────────────────────────────────┘
                    paused

Several routers evaluate it with the same counts; the first that stores a change decides, and the others read
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from kvasir.config.spec.traffic.routes import CanarySpec
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.traffic.evidence import log_evidence
from kvasir_platform.gateway.traffic.outcomes import CRITERIA

Phase = Literal["idle", "running", "paused", "promoted", "rolled_back"]
Action = Literal["start", "pause", "promote", "abort", "undo"]
ACTIONS: tuple[Action, ...] = ("start", "pause", "promote", "abort", "undo")
_FROM: Mapping[Action, tuple[Phase, ...]] = {
    "start": ("idle", "paused", "rolled_back"),
    "pause": ("running",),
    "promote": ("idle", "running", "paused", "rolled_back"),
    "abort": ("running", "paused"),
    "undo": ("promoted",),
}
_TO: Mapping[Action, Phase] = {
    "pause": "paused",
    "promote": "promoted",
    "abort": "rolled_back",
    "undo": "rolled_back",
}
_SUSPECT: Mapping[str, float] = {"errors": 0.5, "slo": 0.5, "ttft": 0.0, "itl": 0.0}
"""The part of the threshold above which evidence keeps a step from ending. Every comparison says something of
times; of errors only the few do in which one of the two failed, and one more failure must not hold a step."""
_WHAT = {
    "errors": "it fails more often",
    "slo": "it misses its SLO class more often",
    "ttft": "its time to first token is longer",
    "itl": "its time between tokens is longer",
}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where a rollout is. `run` counts its starts, and counts of requests belong to a run; `since_s` is when
    the phase or step began, in Unix time. `reason` says why it is there."""

    phase: Phase = "idle"
    run: int = 0
    step: int = 0
    since_s: float = 0.0
    reason: str = ""

    @property
    def compares(self) -> bool:
        """Whether both models get requests."""
        return self.phase in ("running", "paused")

    def share(self, canary: CanarySpec) -> float:
        """Return the share of requests that the canary gets."""
        if self.phase == "promoted":
            return 1.0
        return canary.steps[min(self.step, len(canary.steps) - 1)] if self.compares else 0.0


_DECODER = msgspec.json.Decoder(RolloutState)


def encoded(state: RolloutState) -> bytes:
    """Return the state as JSON."""
    return msgspec.json.encode(state)


def decoded(data: bytes) -> RolloutState:
    """Return the state that `encoded` was given; the first one for what cannot be read, so that a share that
    nobody decided on is never served."""
    try:
        return _DECODER.decode(data) if data else RolloutState()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return RolloutState()


def evidence(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the natural logarithm of the evidence that the canary is worse, by criterion."""
    return {
        each: log_evidence(counts.get(f"{each}_worse", 0), counts.get(f"{each}_better", 0))
        for each in CRITERIA
    }


def threshold(canary: CanarySpec) -> float:
    """Return the evidence at which a canary is rolled back. The criteria share the probability of a false
    rollback."""
    return math.log(len(CRITERIA) / canary.false_rollback)


def decide(
    canary: CanarySpec, state: RolloutState, counts: Mapping[str, int], now_s: float
) -> RolloutState | None:
    """Return the next state, None if nothing changes. `counts` are those of the run, `now_s` is Unix time."""
    if not state.compares:
        return None
    found = evidence(counts)
    worst = max(CRITERIA, key=lambda each: found[each])
    if found[worst] >= threshold(canary):
        pairs = f"{counts.get(f'{worst}_worse', 0)} of {_pairs(counts, worst)} comparisons"
        reason = f"{_WHAT[worst]} than that of the route's model ({pairs})"
        return replace(state, phase="rolled_back", since_s=now_s, reason=reason)
    if state.phase == "paused":
        return None
    bound = threshold(canary)
    suspected = [each for each in CRITERIA if found[each] > _SUSPECT[each] * bound]
    return _progress(canary, state, counts.get(f"compared_{state.step}", 0), suspected, now_s)


def _progress(
    canary: CanarySpec, state: RolloutState, compared: int, suspected: Sequence[str], now_s: float
) -> RolloutState | None:
    """Return the state after the present step, if that is over."""
    elapsed_s, enough = now_s - state.since_s, compared >= canary.min_requests
    if enough and not suspected and elapsed_s >= canary.step_s:
        if state.step + 1 < len(canary.steps):
            return replace(state, step=state.step + 1, since_s=now_s)
        return replace(state, phase="promoted", since_s=now_s, reason="no step showed that it is worse")
    if elapsed_s > canary.timeout_s:
        reason = f"{compared} of {canary.min_requests} requests were compared within {canary.timeout_s:g} s"
        if enough:
            reason = f"after {canary.timeout_s:g} s it is undecided whether {_WHAT[suspected[0]]}"
        return replace(state, phase="paused", since_s=now_s, reason=reason)
    return None


def ordered(state: RolloutState, action: Action, now_s: float) -> RolloutState:
    """Return the state after an operator's order. Raise RequestError 409 (`rollout_state`) if it does not
    apply to the phase."""
    if state.phase not in _FROM[action]:
        phases = " or ".join(_FROM[action])
        raise RequestError(
            f"The rollout is {state.phase}; {action} applies to one that is {phases}.",
            status=409,
            code="rollout_state",
        )
    if action == "start":
        if state.phase == "paused":
            return replace(state, phase="running", since_s=now_s, reason="")
        return RolloutState("running", state.run + 1, 0, now_s)
    return replace(state, phase=_TO[action], since_s=now_s, reason=f"an operator's {action}")


def _pairs(counts: Mapping[str, int], criterion: str) -> int:
    return counts.get(f"{criterion}_worse", 0) + counts.get(f"{criterion}_better", 0)
