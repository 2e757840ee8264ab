"""When a worker takes no more legs, and what it says then."""

from __future__ import annotations

from kvasir.core.messages import Draining, Serving, SetDraining
from kvasir.core.requests import Delta, EngineRequest, FinishReason

WORKER_DRAINING = "worker_draining"
WORKER_OVERLOADED = "worker_overloaded"
ON_REQUEST = "drained on request"


class DrainState:
    """Whether the worker drains, and for whom: an operator can take a drain back, a stop is final."""

    def __init__(self) -> None:
        self.said: Draining | None = None
        """What routers were told; None while legs are taken."""
        self._stopping = False

    def stop(self, reason: str, grace_s: float) -> Draining:
        """The worker is being stopped; returns what to tell every router."""
        self._stopping = True
        self.said = Draining(reason, grace_s)
        return self.said

    def ask(self, message: SetDraining) -> Draining | Serving | None:
        """An operator's wish; returns what to tell every router, None where it changes nothing."""
        if self._stopping:
            return None
        wanted = Draining(message.reason or ON_REQUEST, message.grace_s) if message.draining else None
        if wanted == self.said:
            return None
        self.said = wanted
        return wanted or Serving()


def refusal(request: EngineRequest, code: str, message: str) -> Delta:
    """The only delta of a leg that was not taken."""
    return Delta(
        request_id=request.request_id,
        offset=0,
        finish=FinishReason.ERROR,
        last=True,
        error=code,
        error_message=message,
    )
