"""Measures the queue at intervals, and updates the brown-out."""

from __future__ import annotations

from kvasir.core.errors import CapacityError
from kvasir_router.admission.brownout import Brownout
from kvasir_router.admission.contract import AdmissionRules
from kvasir_router.admission.fair_queue import FairQueue
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.waits import Waits, bounded

_LOOK_S = 0.05
"""Shortest interval between two pressure readings."""
_CALM_LOOK_S = 0.25
"""Longest interval, while requests wait or a brown-out is in force."""


class Watch:
    """Reads the queue and its paces, and sets the brown-out level by the pressure from `waits`."""

    def __init__(
        self, rules: AdmissionRules, queue: FairQueue, paces: tuple[Pace, Pace], waits: Waits
    ) -> None:
        self.brownout = Brownout(rules.brownout)
        self._steps = rules.brownout.steps
        self._queue = queue
        self._paces = paces
        self._waits = waits
        self._looked_s = 0.0
        # Whether requests waited at the last reading, or have been queued since.
        self._crowded = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to measure."""
        return not (self._crowded or self.brownout.level)

    def waited(self) -> None:
        """A request is queued."""
        self._crowded = True

    def check_not_shed(self, level: int) -> None:
        """Raise CapacityError (shed) if the brown-out refuses this class."""
        shed = self.brownout.shed
        if shed is not None and level >= shed:
            raise CapacityError(
                "the service is overloaded and refuses requests of this priority class",
                code="shed",
                retry_after_s=bounded(self.brownout.retry_after_s()),
            )

    def look(self, now: float) -> None:
        """Measure; called after every event unless `idle`."""
        self._crowded = len(self._queue) > 0
        for lane, pace in enumerate(self._paces):
            if not self._queue.waiting[lane]:
                pace.queue_empty(now)
        watched = self._steps and (len(self._queue) or self.brownout.level)
        if watched and now >= self._looked_s + _LOOK_S:
            self._looked_s = now
            self.brownout.update(self._waits.typical(now)[1], now)

    def next_due(self) -> float | None:
        """The time at which `look` may change something without an event."""
        if self.brownout.level or (len(self._queue) and self._steps):
            step = self.brownout.next_due()
            look = self._looked_s + _CALM_LOOK_S
            return look if step is None else min(look, max(self._looked_s + _LOOK_S, step))
        return None
