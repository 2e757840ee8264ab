"""How good a model's predictions of held-out text are, and how far they are from a baseline's. Pure.

A gateway returns for each token of a prompt its log-probability and those of the likeliest tokens. The
divergence is computed from these: over the tokens that both sides list, and one for all others. Merging
tokens never increases it, so the value is a lower bound of the divergence over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.core.quantiles import quantile

_MOST_NATS = 700.0
"""The exponential of more is no float."""
_LEAST_REST = 1e-9
_SAME_LOGPROB = 1e-6


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of held-out text: its log-probability in nats, and those of the likeliest tokens by id, itself
    included."""

    logprob: float
    likely: dict[int, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far predictions are from a baseline's, over all positions."""

    baseline: str
    perplexity: float
    perplexity_ratio: float
    agreement: float
    kl_nats: float
    kl_p99_nats: float


@dataclass(frozen=True, slots=True)
class QualityFigures:
    """What was measured on `tokens` scored tokens of the set `name`; `left_out`: the set has more."""

    name: str
    tokens: int
    left_out: bool
    perplexity: float
    comparison: Comparison | None = None


def perplexity(scored: Sequence[ScoredToken]) -> float:
    """Return the exponential of the mean negative log-probability."""
    return _exp(-math.fsum(each.logprob for each in scored) / len(scored))


def compare(baseline: str, reference: Sequence[ScoredToken], found: Sequence[ScoredToken]) -> Comparison:
    """Compare the scores of the same tokens; `baseline` names the side of `reference`."""
    pairs = list(zip(reference, found, strict=True))
    divergences = [divergence(one.likely, other.likely) for one, other in pairs]
    behind = math.fsum(one.logprob - other.logprob for one, other in pairs) / len(pairs)
    return Comparison(
        baseline=baseline,
        perplexity=perplexity(reference),
        perplexity_ratio=_exp(behind),
        agreement=sum(agrees(one.likely, other.likely) for one, other in pairs) / len(pairs),
        kl_nats=math.fsum(divergences) / len(divergences),
        kl_p99_nats=quantile(divergences, 0.99),
    )


def agrees(reference: dict[int, float], found: dict[int, float]) -> bool:
    """Whether the most likely token of `found` is one in `reference`, which may have several."""
    best = max(found, key=lambda token: found[token])
    return reference.get(best, -math.inf) >= max(reference.values()) - _SAME_LOGPROB


def divergence(reference: dict[int, float], found: dict[int, float]) -> float:
    """Return the KL divergence of `found` from `reference` in nats, over what both list and one rest."""
    total, ours, theirs = 0.0, 1.0, 1.0
    for token, logprob in reference.items():
        other = found.get(token)
        if other is not None:
            chance = math.exp(logprob)
            total += chance * (logprob - other)
            ours -= chance
            theirs -= math.exp(other)
    if ours > _LEAST_REST:
        total += ours * math.log(ours / max(theirs, _LEAST_REST))
    return max(total, 0.0)


def _exp(nats: float) -> float:
    return math.exp(min(nats, _MOST_NATS))
