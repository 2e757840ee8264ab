"""One request of a simulated run, as its router keeps it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvasir.core.requests import Leg, Request, Timings, Usage
from kvasir.ports.routing import Plan
from kvasir_platform.sim.engine.sequence import EngineLeg
from kvasir_router.admission import AdmissionTicket
from kvasir_router.fleet.fleet import Charges


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """`request` is as it was sent to workers last: after failover its prompt holds the output so far, of
    `generated` tokens. `leg` runs at worker `at`; `lease` is a prefill leg at worker `held_at` whose blocks
    are still to be pulled."""

    number: int
    request: Request
    ticket: AdmissionTicket
    output_tokens: int
    plan: Plan | None = None
    charges: Charges = field(default_factory=dict)
    leg: EngineLeg | None = None
    at: str = ""
    lease: EngineLeg | None = None
    held_at: str = ""
    generated: int = 0
    cached: int = 0
    attempts: int = 0
    started_s: float = 0.0

    @property
    def placed(self) -> Plan:
        """The plan of a request that has started."""
        if self.plan is None:
            raise AssertionError("the request has not started")
        return self.plan

    @property
    def left(self) -> int:
        """Output tokens that are still to be generated."""
        return self.output_tokens - self.generated

    def slowness(self, now: float) -> float | None:
        """The time since this attempt began, relative to its prediction; None without one."""
        predicted = self.placed.predicted_ttft_s
        return (now - self.started_s) / max(predicted, 0.02) if predicted else None


def tokens_of(count: int) -> array[int]:
    """Return a prompt of so many tokens; nobody looks at them."""
    return array("I", bytes(4 * count))


def usage_of(leg: EngineLeg, block_tokens: int) -> Usage:
    """Return the counts that the engine reports with the last token of a leg."""
    pulled = leg.prompt_tokens - leg.cached_tokens if leg.moved_bytes else 0
    return Usage(
        prompt_tokens=leg.prompt_tokens,
        cached_tokens=leg.cached_tokens,
        transferred_tokens=pulled,
        transferred_bytes=int(leg.moved_bytes),
        output_tokens=leg.wanted,
        tier_tokens=leg.hit.from_cpu * block_tokens if leg.load_s else 0,
    )


def timings_of(leg: EngineLeg) -> Timings:
    """Return the durations that the engine reports with the last token of a leg."""
    until_prompt = leg.computed_s - leg.started_s
    pulled = leg.leg is Leg.DECODE
    return Timings(
        queue_s=leg.started_s - leg.queued_s,
        prefill_s=0.0 if pulled else max(0.0, until_prompt - leg.load_s),
        transfer_s=until_prompt if pulled else 0.0,
        decode_s=leg.finished_s - leg.computed_s,
        tier_s=leg.load_s,
    )
