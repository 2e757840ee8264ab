"""Why the newest replica of a pool did not start, in Ray's key-value store.

Ray Serve reports a failed constructor as a traceback, and only after it has retried. The replica records the
reason itself, so that the control process reports it at once. If another start would fail in the same way,
the next replica raises the same error without starting an engine.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from kvasir.core.errors import EngineStartError, KvasirError
from kvasir.core.membership import NAMESPACE
from kvasir_workers.pool.start_notice import remove_notice, write_notice

log = logging.getLogger(__name__)


class StartFailure(msgspec.Struct, frozen=True):
    """`message`, `remedy` and `permanent` are as in EngineStartError; `log` is the path of the output, "" if
    it is not kept. `repeat`: the next replica raises this error again."""

    message: str
    remedy: str = ""
    permanent: bool = False
    log: str = ""
    repeat: bool = False


def failure_of(error: Exception, log_file: str) -> StartFailure:
    """Return the failure of a constructor that raised `error`."""
    if isinstance(error, EngineStartError):
        return StartFailure(error.message, error.remedy, error.permanent, log_file, error.permanent)
    message = error.message if isinstance(error, KvasirError) else str(error) or type(error).__name__
    return StartFailure(message, log=log_file)


def record_failure(deployment: str, pool: str, failure: StartFailure) -> None:
    """Store it as the pool's newest, and for this pod's startup probe. Blocks. If Ray does not answer,
    Serve's report of the constructor remains."""
    write_notice(os.environ, failure.message, failure.remedy)
    try:
        _put(deployment, pool, failure)
    except Exception as error:  # noqa: BLE001 - Ray raises several private types; the constructor's error matters
        log.warning("cannot record why this replica did not start: %s", error)


def read_failure(deployment: str, pool: str) -> StartFailure | None:
    """Return the pool's newest failure, None if its newest replica has started. Blocks on Ray."""
    raw: Any = _internal_kv_get(failure_key(deployment, pool), namespace=NAMESPACE)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=StartFailure)
    except msgspec.DecodeError:
        return None


def forget_failure(deployment: str, pool: str) -> None:
    """Remove the pool's failure: a replica has started, or another one is to be started. Blocks on Ray."""
    remove_notice(os.environ)
    _internal_kv_del(failure_key(deployment, pool), namespace=NAMESPACE)


def raise_again(deployment: str, pool: str) -> None:
    """Raise EngineStartError if the previous replica of the pool failed for a permanent reason; once, so that
    a pool that Serve keeps retrying starts when the reason is gone. Blocks on Ray."""
    failure = read_failure(deployment, pool)
    if failure is None or not failure.repeat:
        return
    _put(deployment, pool, msgspec.structs.replace(failure, repeat=False))
    write_notice(os.environ, failure.message, failure.remedy)
    raise EngineStartError(failure.message, remedy=failure.remedy, permanent=failure.permanent)


def failure_key(deployment: str, pool: str) -> bytes:
    """Return the key of the pool's newest failure."""
    return f"kvasir/{deployment}/failure/{pool}".encode()


def _put(deployment: str, pool: str, failure: StartFailure) -> None:
    key = failure_key(deployment, pool)
    _internal_kv_put(key, msgspec.json.encode(failure), overwrite=True, namespace=NAMESPACE)
