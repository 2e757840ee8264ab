"""The one tree of errors that Kvasir raises on purpose.

    KvasirError
    ├── RequestError            the client can mend it: carries status, code and param
    ├── CapacityError           ours to mend, the client may retry: carries reason and retry_after_s
    ├── UpstreamError           a worker failed while it served the request
    ├── RegistrationError       a worker may not join: shows both sides of what differs
    ├── ProtocolError           the peer broke the session's contract
    ├── TransferError           KV blocks did not arrive; the receiver recomputes or fails
    ├── ConfigError             kvasir.yaml or the machine does not allow a start
    └── StartError              a process of the deployment did not come up, or ended: names its log

Codes are stable: clients and dashboards match on them, never on messages.
"""

from __future__ import annotations


class KvasirError(Exception):
    """Root of the tree. `code` is stable; `message` says what to do next."""

    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class RequestError(KvasirError):
    """The request cannot be served as sent."""

    code = "invalid_request"

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.param = param


class CapacityError(KvasirError):
    """The request is sound, and there is no room or no worker for it."""

    code = "no_capacity"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class UpstreamError(KvasirError):
    """A worker failed while it held the request."""

    code = "worker_failed"


class RegistrationError(KvasirError):
    """A worker's identity does not fit the deployment or its peers."""

    code = "registration_refused"


class ProtocolError(KvasirError):
    """The peer broke the session's contract; the session ends."""

    code = "protocol_error"


class TransferError(KvasirError):
    """A KV transfer failed, was cut, expired, or did not verify."""

    code = "transfer_failed"


class ConfigError(KvasirError):
    """The deployment cannot start as written, or not on this machine."""

    code = "config_error"


class StartError(KvasirError):
    """A process of the deployment did not come up, or ended by itself. `log` is the path of its
    output, "" when it has none; `remedy` says what to do."""

    code = "start_failed"

    def __init__(self, message: str, *, log: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.remedy = remedy
