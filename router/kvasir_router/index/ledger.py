"""Which blocks requests are predicted to leave on their workers, until it is known."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvasir.ports.routing import RoutingTarget
from kvasir_router.index.fleet_index import FleetIndex


class PredictionLedger:
    """The open predictions of `index`, by request and target."""

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self._open: dict[str, dict[RoutingTarget, int]] = {}

    def __len__(self) -> int:
        """Return the number of requests with predictions that are neither confirmed nor abandoned."""
        return len(self._open)

    def predict(
        self, request_id: str, targets: Iterable[RoutingTarget], names: array[int], now: float
    ) -> None:
        """Predict the blocks `names` at each target, in place of what was predicted for the request."""
        self.abandon(request_id)
        self._open[request_id] = {target: self._index.predict(target, names, now) for target in targets}

    def confirm(self, request_id: str, target: RoutingTarget, now: float) -> None:
        """The blocks are cached at `target`."""
        predicted = self._open.get(request_id, {})
        prediction = predicted.pop(target, 0)
        if prediction:
            self._index.settle(target, prediction, now)
        if not predicted:
            self._open.pop(request_id, None)

    def abandon(self, request_id: str) -> None:
        """Drop the predictions for the request that have not been confirmed."""
        for target, prediction in self._open.pop(request_id, {}).items():
            if prediction:
                self._index.forget(target, prediction)
