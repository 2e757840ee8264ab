"""When a worker refuses legs, and the refusal it sends."""

from __future__ import annotations

from kvasir.core.messages import Draining, Serving, SetDraining
from kvasir.core.requests import Delta, EngineRequest, FinishReason

WORKER_DRAINING = "worker_draining"
WORKER_OVERLOADED = "worker_overloaded"
ON_REQUEST = "drained on request"


class DrainState:
    """Whether the worker drains, and why: an operator can cancel a drain, a stop is final."""

    def __init__(self) -> None:
        self.message: Draining | None = None
        """The drain message sent to routers; None while legs are accepted."""
        self._stopping = False

    def stop(self, reason: str, grace_s: float) -> Draining:
        """Begin the worker's stop; return the message for every router."""
        self._stopping = True
        self.message = Draining(reason, grace_s)
        return self.message

    def ask(self, message: SetDraining) -> Draining | Serving | None:
        """Apply an operator's request; return the message for every router, None if nothing changes."""
        if self._stopping:
            return None
        wanted = Draining(message.reason or ON_REQUEST, message.grace_s) if message.draining else None
        if wanted == self.message:
            return None
        self.message = wanted
        return wanted or Serving()


def refusal(request: EngineRequest, code: str, message: str) -> Delta:
    """Return the only delta of a refused leg."""
    return Delta(
        request_id=request.request_id,
        offset=0,
        finish=FinishReason.ERROR,
        last=True,
        error=code,
        error_message=message,
    )
