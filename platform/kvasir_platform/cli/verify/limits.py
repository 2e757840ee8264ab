"""What `kvasir verify --quality` lets pass. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir_platform.cli.verify import arguments
from kvasir_platform.cli.verify.checks import VerifyCheck
from kvasir_platform.cli.verify.scores import QualityFigures

PERPLEXITY = "perplexity of held-out text"
RATIO = "perplexity against the baseline"
AGREEMENT = "most likely tokens as in the baseline"
DIVERGENCE = "KL divergence from the baseline"


@dataclass(frozen=True, slots=True)
class QualityLimits:
    """What passes. `perplexity` None: any. The others apply to the comparison with a baseline: the quotient
    of the perplexities, the share of positions with the same most likely token, and the mean divergence
    in nats."""

    perplexity: float | None = None
    perplexity_ratio: float = arguments.PERPLEXITY_RATIO
    agreement: float = arguments.AGREEMENT
    kl_nats: float = arguments.KL_NATS


def quality_checks(figures: QualityFigures, limits: QualityLimits) -> list[VerifyCheck]:
    """Judge what was measured."""
    shown = f"{figures.perplexity:.4g} over {figures.tokens:,} tokens of {figures.name}"
    if figures.left_out:
        shown += ", which has more"
    checks = [_own(shown, figures, limits)]
    if (compared := figures.comparison) is None:
        return checks
    return [
        *checks,
        VerifyCheck(
            RATIO,
            _verdict(compared.perplexity_ratio <= limits.perplexity_ratio),
            f"{compared.perplexity_ratio:.4f} times {compared.perplexity:.4g} of {compared.baseline}, "
            f"at most {limits.perplexity_ratio:g} allowed",
        ),
        VerifyCheck(
            AGREEMENT,
            _verdict(compared.agreement >= limits.agreement),
            f"at {compared.agreement:.2%} of positions, at least {limits.agreement:.2%} wanted",
        ),
        VerifyCheck(
            DIVERGENCE,
            _verdict(compared.kl_nats <= limits.kl_nats),
            f"{compared.kl_nats:.5f} nats in the mean, {compared.kl_p99_nats:.5f} at the 99th percentile, at "
            f"most {limits.kl_nats:g} in the mean allowed",
        ),
    ]


def _own(shown: str, figures: QualityFigures, limits: QualityLimits) -> VerifyCheck:
    if limits.perplexity is not None:
        passed = figures.perplexity <= limits.perplexity
        return VerifyCheck(PERPLEXITY, _verdict(passed), f"{shown}, at most {limits.perplexity:g} allowed")
    return VerifyCheck(PERPLEXITY, "skip", f"{shown}; --max-perplexity sets a limit")


def _verdict(passed: bool) -> Literal["pass", "fail"]:
    return "pass" if passed else "fail"
