"""What was foreseen of workers' caches against what their engines found: the last check of the whole chain.

A digest that agrees, golden prompts that agree and a log without holes still do not prove that a hit which
the index promises is one that the engine gives. So the two are compared for each request, and a worker on
which they stay apart is not believed any more, with the figures said.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.kv import KvState
from kvasir_router.index import IndexViewId


@dataclass(frozen=True, slots=True)
class ReconcileLimits:
    """`threshold` is the error that is too much, as a fraction of the prompt, and `patience` the requests in
    a row over which the mean has to stay above it. The mean forgets by a factor of e within `memory`
    requests. Where less than `void` of what was foreseen is found, the worker caches nothing."""

    threshold: float = 0.2
    patience: int = 32
    memory: float = 32.0
    void: float = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """Do not believe what is known of a worker. `void`: nor what is foreseen, for it keeps nothing."""

    reason: str
    void: bool


@dataclass(frozen=True, slots=True)
class Errors:
    """A worker's record: the mean relative error lately, and since its session began the requests that were
    judged and the tokens by which they were misjudged."""

    ratio: float = 0.0
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Record:
    """Sums that fade: each judged request weighs 1, and less with every one after it."""

    picture: IndexViewId
    weight: float = 0.0
    error: float = 0.0
    predicted: float = 0.0
    found: float = 0.0
    above: int = 0
    judged: bool = False


class Reconciler:
    """Judges workers by their finished requests. Memory is a few numbers for each worker."""

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
        """A prompt was computed on the worker: `predicted` of its tokens were to be cached there, and `found`
        were. The last `remote` of the former were to come from a remote store: what that has dropped
        meanwhile is not held against the worker. Returns a verdict once, when its error has stayed too
        high."""
        predicted = max(predicted - remote, min(predicted, found))
        # Of a cache that is not known at the time nothing was promised; and no hit where none was foreseen
        # is what any worker does, so that it would only water down the mean.
        if picture.state is KvState.CATCHING_UP or prompt_tokens <= 0 or not (predicted or found):
            return None
        record = self._records.get(worker_id)
        if record is None or record.picture != picture:
            record = self._records[worker_id] = _Record(picture)
        wrong = abs(predicted - found)
        total = self._totals.get(worker_id, Errors())
        self._add(record, min(1.0, wrong / prompt_tokens), predicted, found)
        ratio = record.error / record.weight
        self._totals[worker_id] = Errors(ratio, total.requests + 1, total.tokens + wrong)
        record.above = record.above + 1 if ratio > self._limits.threshold else 0
        if record.judged or record.above < self._limits.patience:
            return None
        record.judged = True
        return self._verdict(record, ratio)

    def errors(self, worker_id: str) -> Errors:
        """The worker's record."""
        return self._totals.get(worker_id, Errors())

    def forget(self, worker_id: str) -> None:
        """The worker's session is over."""
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
            f"foreseen and found cached tokens differ by {ratio:.0%} of the prompt, as they have over "
            f"{record.above} requests: lately {predicted:.0f} foreseen and {found:.0f} found in each"
            + ("; it seems to cache nothing" if void else ""),
            void,
        )
