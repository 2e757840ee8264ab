"""Whether speculative decoding pays: the time of a round against the tokens that it gives.

A round drafts `lookahead` tokens one after the other, and verifies them in one step of the target model
(Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023). It pays while steps are
limited by memory: verification then reads the same weights once for several tokens. With large batches it
takes arithmetic that decoding without it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.performance.step import EngineModel, accepted_tokens


@dataclass(frozen=True, slots=True)
class Speculation:
    """Each of `lookahead` proposals is accepted with probability `acceptance` if all before it are. `draft`
    proposes them, one step each; None for proposals without a model, as those looked up in the prompt."""

    acceptance: float
    lookahead: int
    draft: EngineModel | None = None


@dataclass(frozen=True, slots=True)
class SpeculationGain:
    """Seconds of a round and of a step without speculation, and the expected tokens of a round for each
    stream."""

    round_s: float
    plain_s: float
    tokens: float

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens of a stream with speculation."""
        return self.round_s / self.tokens

    @property
    def speed_up(self) -> float:
        """How many times as many tokens a second a stream gets."""
        return self.plain_s / self.itl_s

    @property
    def pays(self) -> bool:
        """Whether a stream is faster with speculation."""
        return self.speed_up > 1.0


def speculation_gain(
    engine: EngineModel, speculation: Speculation, streams: int, context: float
) -> SpeculationGain:
    """Return what speculation does for `streams` concurrent streams of `context` tokens each."""
    verify = engine.decode(streams, context, lookahead=speculation.lookahead).seconds
    draft = speculation.draft
    drafting = speculation.lookahead * draft.decode(streams, context).seconds if draft is not None else 0.0
    return SpeculationGain(
        round_s=verify + drafting,
        plain_s=engine.decode(streams, context).seconds,
        tokens=accepted_tokens(speculation.acceptance, speculation.lookahead),
    )


def best_lookahead(
    engine: EngineModel, speculation: Speculation, streams: int, context: float, *, most: int = 16
) -> int:
    """Return the lookahead of 1 to `most` that gives most tokens a second, 0 if none pays."""
    gains = {
        lookahead: speculation_gain(
            engine, Speculation(speculation.acceptance, lookahead, speculation.draft), streams, context
        )
        for lookahead in range(1, most + 1)
    }
    best = max(gains, key=lambda lookahead: gains[lookahead].speed_up)
    return best if gains[best].pays else 0
