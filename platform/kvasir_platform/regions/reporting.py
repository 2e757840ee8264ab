"""What this cell reports of itself to the others, from what its router says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from msgspec import structs

from kvasir.core.identity import WorkerIdentity
from kvasir.ports.clock import Clock
from kvasir.ports.router import AdmissionView, EndedRequests, RouterPort
from kvasir_platform.regions.needs.features import Features
from kvasir_router.regions.reports import CellReport, ModelReport, encode_report

KEPT_S = 0.25
"""How old this cell's view of itself may be when it decides."""
MAX_FEATURE_BYTES = 96 << 10
"""Characters of all features in a report. Models beyond them are served elsewhere without."""
_ENDED = 64
"""Requests that ended last, from which the rate of prefill is taken."""


class OwnReports:
    """Makes this cell's reports. `epoch` grows with each start of the process; `price` is for a million
    tokens, and `features` are what requests may need beside a model."""

    def __init__(
        self,
        cell: str,
        router: RouterPort,
        clock: Clock,
        *,
        epoch: int,
        price: float,
        features: Features,
    ) -> None:
        self.draining = False
        """Whether the cell takes no more requests of others."""
        self._cell = cell
        self._router = router
        self._clock = clock
        self._epoch = epoch
        self._price = price
        self._features = features
        self._sequence = 0
        self._made_s = float("-inf")
        self._latest = CellReport(cell, epoch, 0)

    def latest(self) -> CellReport:
        """Return a report that is at most KEPT_S old."""
        now = self._clock.now()
        if now - self._made_s >= KEPT_S:
            self._made_s = now
            self._latest = self._make(self._sequence)
        return self._latest

    def encoded(self) -> bytes:
        """Return a new report for other cells."""
        self._sequence += 1
        return encode_report(self._make(self._sequence))

    def _make(self, sequence: int) -> CellReport:
        ready: dict[tuple[str, str], list[WorkerIdentity]] = defaultdict(list)
        for view in self._router.workers():
            if view.state == "ready" and view.identity is not None:
                ready[view.identity.model, view.identity.revision].append(view.identity)
        served = {model: why is None for model, why in self._router.not_ready_models().items()}
        queues, rates = self._router.admission(), prefill_rates(self._router.ended())
        models, loaded, room = [], self._router.adapters.served().values(), MAX_FEATURE_BYTES
        for (model, revision), workers in sorted(ready.items()):
            features = self._features.of(model, workers, loaded)
            room -= sum(map(len, features))
            made = self._model(model, revision, queues.get(model), rates)
            count = len(workers) if served.get(model) else 0
            models.append(structs.replace(made, ready=count, features=features if room >= 0 else ()))
        return CellReport(self._cell, self._epoch, sequence, tuple(models), self.draining)

    def _model(
        self, model: str, revision: str, queue: AdmissionView | None, rates: dict[str, float]
    ) -> ModelReport:
        queue = queue or AdmissionView()
        return ModelReport(
            model,
            revision,
            queue_s=max(0.0, queue.wait_s),
            prefill_tokens_per_s=rates.get(model, 0.0),
            kv_free_tokens=max(0, queue.kv_tokens - queue.reserved_tokens),
            dollars_per_mtok=self._price,
        )


def prefill_rates(ended: Iterable[EndedRequests]) -> dict[str, float]:
    """Return the prompt tokens that one worker computed in a second, by model, over the requests of each that
    ended last."""
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for summary in chain.from_iterable(of_model[-_ENDED:] for of_model in ended):
        computed = summary.usage.prompt_tokens - summary.usage.cached_tokens
        if summary.computed_s > 0 and computed > 0:
            tokens[summary.model] += computed
            seconds[summary.model] = seconds.get(summary.model, 0.0) + summary.computed_s
    return {model: count / seconds[model] for model, count in tokens.items()}
