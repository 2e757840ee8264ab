"""What `kvasir verify` concludes from its measurements. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir_platform.cli.verify.client import VerifiedCompletion

TIE_NATS = 0.1
"""Two tokens whose log-probabilities differ by less are a tie: kernels that add in another order, as other
batch shapes and parallel layouts do, may pick either."""

Result = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class VerifyCheck:
    """One question, its answer, and the evidence in words."""

    name: str
    result: Result
    detail: str


def same_tokens(name: str, expected: VerifiedCompletion, found: VerifiedCompletion) -> VerifyCheck:
    """Compare greedy tokens. A first difference passes if the reference itself was undecided there: what
    follows it has another context, and is not compared."""
    pairs = zip(expected.tokens, found.tokens, strict=False)
    at = next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if at is None and len(expected.tokens) == len(found.tokens):
        return VerifyCheck(name, "pass", f"{len(expected.tokens)} tokens are equal")
    if at is None:
        return VerifyCheck(
            name, "fail", f"{len(found.tokens)} tokens, and the reference has {len(expected.tokens)}"
        )
    likely = expected.likely[at] if at < len(expected.likely) else {}
    mine, theirs = (likely.get(each.tokens[at]) for each in (expected, found))
    if mine is None or theirs is None:
        return VerifyCheck(
            name,
            "fail",
            f"token {at + 1} is {found.tokens[at]}, and {expected.tokens[at]} in the reference, which does "
            "not hold it for likely",
        )
    gap = abs(mine - theirs)
    text = (
        f"token {at + 1} of {len(expected.tokens)} differs; the reference holds the two {gap:.3f} nats apart"
    )
    if gap > TIE_NATS:
        return VerifyCheck(name, "fail", f"{text}, more than {TIE_NATS:g}")
    return VerifyCheck(name, "pass", f"{text}, a tie of rounding")


def prefix_hit(found: VerifiedCompletion, prompt_tokens: int) -> VerifyCheck:
    """Judge the second request of a prompt."""
    share = found.cached_tokens / prompt_tokens
    detail = f"{found.cached_tokens:,} of {prompt_tokens:,} prompt tokens came from a cache"
    return VerifyCheck("a repeated prompt hits the prefix cache", "pass" if share >= 0.5 else "fail", detail)


def at_rest(status: Mapping[str, Any]) -> str | None:
    """Return what a gateway's /status shows of unfinished work; None for nothing."""
    if status.get("in_flight"):
        return f"{status['in_flight']} calls are in flight"
    for worker in status.get("workers", ()):
        load = worker.get("load") or {}
        for field in ("running", "waiting", "kv_blocks_leased", "kv_usage"):
            if load.get(field):
                return f"{worker['worker_id']}: {field} is {load[field]:g}"
        if worker.get("in_flight"):
            return f"{worker['worker_id']}: {worker['in_flight']} requests are in flight"
    return None


@dataclass(frozen=True, slots=True)
class PredictionSample:
    """Predicted and measured TTFT of one request, in seconds from its arrival."""

    predicted_s: float
    actual_s: float

    @property
    def error(self) -> float:
        """The relative error."""
        return abs(self.predicted_s - self.actual_s) / self.actual_s


def prediction_of(decision: Mapping[str, Any]) -> PredictionSample | None:
    """Return what a decision record says; None from a policy that predicts nothing, or without a token."""
    predicted, actual = decision.get("predicted_ttft_s"), decision.get("actual_ttft_s")
    if not predicted or not actual:
        return None
    return PredictionSample(float(decision.get("queued_s") or 0.0) + float(predicted), float(actual))


def prediction_check(samples: Sequence[PredictionSample]) -> VerifyCheck:
    """Tell how far predictions are off. It fails nothing: a router learns its rates from its first requests,
    and a wrong prediction makes placement worse, not answers."""
    name = "the predicted TTFT"
    if not samples:
        return VerifyCheck(name, "skip", "the routing policy predicts none")
    error = statistics.median(each.error for each in samples)
    return VerifyCheck(name, "pass", f"median error {error:.0%} over {len(samples)} requests")


def hardware_of(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return each kind of worker in words: pool, engine, device."""
    kinds: dict[str, int] = {}
    for worker in workers:
        device = (worker.get("hardware") or {}).get("device") or "unknown device"
        devices = (worker.get("hardware") or {}).get("devices") or 1
        each = f"{devices} × {device}" if devices > 1 else device
        kind = f"{worker['pool']}: {worker.get('engine') or 'unknown engine'} on {each}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return [f"{kind} ({count} workers)" if count > 1 else kind for kind, count in sorted(kinds.items())]
