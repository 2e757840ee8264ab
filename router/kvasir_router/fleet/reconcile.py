"""Compares predicted cache hits with those that engines report, as the last check of the prefix index.

Matching digests, matching golden prompts and a log without gaps do not prove that the engine delivers the
hits that the index promises. The two are compared for each request, and a worker on which they keep differing
is demoted, with the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.kv import KvState, KvStatus, Medium
from kvasir.core.requests import Usage
from kvasir.ports.routing import Plan
from kvasir_router.index import FleetIndex, IndexViewId


@dataclass(frozen=True, slots=True)
class ReconcileLimits:
    """`threshold` is the allowed error as a fraction of the prompt, and `patience` the number of consecutive
    requests with a mean above it before the verdict. The mean decays by a factor of e within `memory`
    requests. If less than the fraction `void` of the prediction is found, the worker caches nothing."""

    threshold: float = 0.2
    patience: int = 32
    memory: float = 32.0
    void: float = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """Demote a worker. `void`: drop its predictions too, since it caches nothing."""

    reason: str
    void: bool


@dataclass(frozen=True, slots=True)
class Errors:
    """A worker's record: the recent mean relative error, and since its session began the number of judged
    requests and the tokens by which predictions differed."""

    ratio: float = 0.0
    requests: int = 0
    tokens: int = 0


_NO_ERRORS = Errors()


@dataclass(slots=True)
class _Record:
    """Decaying sums: each judged request weighs 1, and less with every later one."""

    picture: IndexViewId
    weight: float = 0.0
    error: float = 0.0
    predicted: float = 0.0
    found: float = 0.0
    above: int = 0
    judged: bool = False


class Reconciler:
    """Judges workers by their finished requests. Memory is a few numbers per worker."""

    def __init__(self, limits: ReconcileLimits | None = None) -> None:
        self._limits = limits or ReconcileLimits()
        self._fade = 1.0 - 1.0 / self._limits.memory
        self._records: dict[str, _Record] = {}
        self._totals: dict[str, Errors] = {}

    def observe(
        self,
        worker_id: str,
        picture: IndexViewId,
        *,
        prompt_tokens: int,
        predicted: int,
        found: int,
        remote: int = 0,
    ) -> Verdict | None:
        """A prompt was computed on the worker: `predicted` of its tokens were expected to be cached there,
        and `found` were. The last `remote` of the former were expected in a remote store, whose evictions do
        not count against the worker. Return a verdict once, when the error has stayed too high."""
        predicted = max(predicted - remote, min(predicted, found))
        # Without a known cache nothing was promised, and no hit where none was predicted is
        # what any worker does, so counting it would only dilute the mean.
        if picture.state is KvState.CATCHING_UP or prompt_tokens <= 0 or not (predicted or found):
            return None
        record = self._records.get(worker_id)
        if record is None or record.picture != picture:
            record = self._records[worker_id] = _Record(picture)
        wrong = abs(predicted - found)
        total = self._totals.get(worker_id, _NO_ERRORS)
        self._add(record, min(1.0, wrong / prompt_tokens), predicted, found)
        ratio = record.error / record.weight
        self._totals[worker_id] = Errors(ratio, total.requests + 1, total.tokens + wrong)
        record.above = record.above + 1 if ratio > self._limits.threshold else 0
        if record.judged or record.above < self._limits.patience:
            return None
        record.judged = True
        return self._verdict(record, ratio)

    def errors(self, worker_id: str) -> Errors:
        """Return the worker's record."""
        return self._totals.get(worker_id, _NO_ERRORS)

    def forget(self, worker_id: str) -> None:
        """The worker's session ended."""
        self._records.pop(worker_id, None)
        self._totals.pop(worker_id, None)

    def _add(self, record: _Record, error: float, predicted: int, found: int) -> None:
        record.weight = self._fade * record.weight + 1.0
        record.error = self._fade * record.error + error
        record.predicted = self._fade * record.predicted + predicted
        record.found = self._fade * record.found + found

    def _verdict(self, record: _Record, ratio: float) -> Verdict:
        predicted, found = record.predicted / record.weight, record.found / record.weight
        void = found < self._limits.void * predicted
        return Verdict(
            f"predicted and found cached tokens differ by {ratio:.0%} of the prompt, as they have over "
            f"{record.above} requests: recently {predicted:.0f} predicted and {found:.0f} found in each"
            + ("; it appears to cache nothing" if void else ""),
            void,
        )


class IndexHits:
    """Compares the hits that `index` promised with those found, and demotes workers there."""

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self._reconciler = Reconciler()

    def compare(self, plan: Plan, usage: Usage, now: float) -> None:
        """Compare those of a request that ended well."""
        worker_id = plan.prefill_target.worker_id
        picture = self._index.picture(worker_id)
        if picture is None:
            return
        verdict = self._reconciler.observe(
            worker_id,
            picture,
            prompt_tokens=usage.prompt_tokens,
            predicted=plan.predicted_cached_tokens,
            found=usage.cached_tokens,
            remote=plan.predicted_tier_tokens[Medium.REMOTE - 1],
        )
        if verdict is not None:
            self._index.demote(worker_id, verdict.reason, now, void=verdict.void)

    def status(self, worker_id: str) -> KvStatus | None:
        """Return the worker's cache with its errors; None for an unknown worker."""
        status, errors = self._index.status(worker_id), self._reconciler.errors(worker_id)
        if status is None:
            return None
        return status.with_errors(errors.ratio, errors.requests, errors.tokens)

    def forget(self, worker_id: str) -> None:
        """The worker's session ended."""
        self._reconciler.forget(worker_id)
