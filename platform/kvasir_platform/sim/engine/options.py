"""How a simulated engine forms batches, and what it does when its KV memory is full."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir.performance.step import accepted_tokens


class Batching(StrEnum):
    """STATIC: what waits, when the batch before has ended. DYNAMIC: a full batch, or what waits after a time.
    Both run until the longest output of the batch has ended. CONTINUOUS: requests join and leave at every
    step (Yu et al., Orca, OSDI 2022)."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class Preemption(StrEnum):
    """What happens to the request that makes room. RECOMPUTE: its KV is computed again, from prompt and
    output so far. SWAP: its KV goes to CPU memory and back. DROP: it starts again, without its output."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Each of `lookahead` proposals of a step is accepted with probability `acceptance`. A proposal costs
    `draft_cost` of a decode step: 0 for n-grams, about 0.05 for a small draft model (Leviathan et al., 2023,
    call it c)."""

    acceptance: float
    lookahead: int
    draft_cost: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a stream in a step."""
        return accepted_tokens(self.acceptance, self.lookahead)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """`most` sequences run at once, and a step holds `step_tokens`. `wait_s` is how long DYNAMIC waits for a
    full batch. Without `chunked`, prompts are computed whole, in steps without streams."""

    batching: Batching = Batching.CONTINUOUS
    most: int = 256
    step_tokens: int = 8192
    wait_s: float = 0.1
    chunked: bool = True
    prefix_cache: bool = True
    preemption: Preemption = Preemption.RECOMPUTE
    speculation: SpeculationOptions | None = None

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a stream in a step."""
        return 1.0 if self.speculation is None else self.speculation.tokens_per_step

    @property
    def lookahead(self) -> int:
        """Proposals of a stream in a step."""
        return 0 if self.speculation is None else self.speculation.lookahead
