"""One leg of a request at a simulated engine, and what the engine did for it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvasir.core.requests import Leg
from kvasir_platform.sim.replay.cache import Hit


@dataclass(slots=True, eq=False)
class EngineLeg:
    """One leg at one engine: `prompt_tokens` to compute, whose whole blocks have `names`, and then
    `output_tokens` to generate. `pulls`: a decode leg's prompt comes from another worker.

    Times are in virtual seconds, 0 for what has not happened: it left the queue at `started_s`, its prompt
    was complete at `computed_s`, its first token came at `first_s`. `load_s` is the time to load blocks from
    CPU memory. `generated` counts tokens, as an expectation with speculation. Preempted legs keep their
    times."""

    number: int
    leg: Leg
    prompt_tokens: int
    output_tokens: int
    names: array[int]
    queued_s: float
    started_s: float = 0.0
    computed_s: float = 0.0
    first_s: float = 0.0
    finished_s: float = 0.0
    hit: Hit = Hit(0, 0)
    cached_tokens: int = 0
    load_s: float = 0.0
    moved_bytes: float = 0.0
    generated: float = 0.0
    preemptions: int = 0

    # What the engine keeps of it while it runs.
    order: int = 0
    target: int = 0
    computed: int = 0
    filled: int = 0
    blocks: int = 0
    growth: int = 0
    swapped: bool = False
    base: float = 0.0
    end_step: int = 0
    ended: bool = False

    @property
    def pulls(self) -> bool:
        """Whether its prompt is pulled, and not computed here."""
        return self.leg is Leg.DECODE

    @property
    def wanted(self) -> int:
        """Output tokens of this leg."""
        return 1 if self.leg is Leg.PREFILL else self.output_tokens


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """What came of one event at an engine: legs whose prompt became complete for the first time, and legs
    that ended."""

    computed: tuple[EngineLeg, ...] = ()
    ended: tuple[EngineLeg, ...] = ()


@dataclass(slots=True)
class EngineTotals:
    """What one engine did. Seconds and tokens; `gaps` counts the tokens of streams by their distance from the
    one before, in bins of `GapBins`."""

    busy_s: float = 0.0
    prefilled_tokens: int = 0
    generated_tokens: float = 0.0
    preemptions: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    load_s: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
    gaps: dict[int, float] = field(default_factory=dict)
