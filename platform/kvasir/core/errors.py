"""The tree of errors that Kvasir raises.

    KvasirError
    ├── RequestError            the client can correct it: has status, code and param
    ├── CapacityError           no capacity, the client can retry: has reason and retry_after_s
    ├── UpstreamError           a worker failed while it served the request
    ├── ProtocolError           the peer violated the session protocol
    ├── TransferError           KV blocks did not arrive; the receiver recomputes or fails
    ├── ConfigError             the deployment cannot start with this kvasir.yaml or on this machine
    │   └── EngineStartError    an engine did not start: has the root error and a remedy
    └── StartError              a process of the deployment did not start, or ended: names its log

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
    """The request is valid, but there is no capacity or no worker for it."""

    code = "no_capacity"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class UpstreamError(KvasirError):
    """A worker failed while it served the request."""

    code = "worker_failed"


class ProtocolError(KvasirError):
    """The peer violated the session protocol; the session ends."""

    code = "protocol_error"


class TransferError(KvasirError):
    """A KV transfer failed, was interrupted, expired, or did not verify."""

    code = "transfer_failed"


class ConfigError(KvasirError):
    """The deployment cannot start as configured, or not on this machine."""

    code = "config_error"


class EngineStartError(ConfigError):
    """An engine did not start. `message` is one sentence with the root error; `remedy` says what to change,
    "" if that is unknown; `permanent`: another start with the same spec fails in the same way."""

    def __init__(self, message: str, *, remedy: str = "", permanent: bool = False) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.permanent = permanent


class StartError(KvasirError):
    """A process of the deployment did not start, or ended unexpectedly. `log` is the path of its output, ""
    for none; `remedy` says what to do; `is_root`: `message` is the root error, and the log adds no other."""

    code = "start_failed"

    def __init__(self, message: str, *, log: str = "", remedy: str = "", is_root: bool = False) -> None:
        super().__init__(message)
        self.log = log
        self.remedy = remedy
        self.is_root = is_root
