"""Looks at what waits every so often, and sees to the brown-out."""

from __future__ import annotations

from kvasir.core.errors import CapacityError
from kvasir_router.admission.brownout import Brownout
from kvasir_router.admission.contract import AdmissionRules
from kvasir_router.admission.fair_queue import FairQueue
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.waits import Waits, bounded

_LOOK_S = 0.05
"""Pressure is not looked at more often than this."""
_CALM_LOOK_S = 0.25
"""Nor less often, while anything waits or is done about it."""


class Watch:
    """Reads the queue and its paces by lane, and moves the brown-out by the pressure that `waits` tells."""

    def __init__(
        self, rules: AdmissionRules, queue: FairQueue, paces: tuple[Pace, Pace], waits: Waits
    ) -> None:
        self.brownout = Brownout(rules.brownout)
        self._steps = rules.brownout.steps
        self._queue = queue
        self._paces = paces
        self._waits = waits
        self._looked_s = 0.0
        # Whether anything waited when that was looked at last, or has begun to wait since.
        self._crowded = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to see to."""
        return not (self._crowded or self.brownout.level)

    def waited(self) -> None:
        """Somebody begins to wait."""
        self._crowded = True

    def refuse_what_is_shed(self, level: int) -> None:
        """Raises CapacityError (shed) for a class that the brown-out in force refuses."""
        shed = self.brownout.shed
        if shed is not None and level >= shed:
            raise CapacityError(
                "under pressure, requests of this priority class are refused",
                code="shed",
                retry_after_s=bounded(self.brownout.retry_after_s()),
            )

    def look(self, now: float) -> None:
        """After anything has happened, unless `idle`."""
        self._crowded = len(self._queue) > 0
        for lane, pace in enumerate(self._paces):
            if not self._queue.waiting[lane]:
                pace.nobody_waits(now)
        watched = self._steps and (len(self._queue) or self.brownout.level)
        if watched and now >= self._looked_s + _LOOK_S:
            self._looked_s = now
            self.brownout.update(self._waits.typical(now)[1], now)

    def next_due(self) -> float | None:
        """When `look` may change something though nothing has happened."""
        if self.brownout.level or (len(self._queue) and self._steps):
            step = self.brownout.next_due()
            look = self._looked_s + _CALM_LOOK_S
            return look if step is None else min(look, max(self._looked_s + _LOOK_S, step))
        return None
