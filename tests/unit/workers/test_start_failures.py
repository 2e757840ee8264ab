"""The reason for which a replica did not start, as the control process and the next replica read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.core.errors import ConfigError, EngineStartError
from kvasir_workers.pool import failures
from kvasir_workers.pool.failures import (
    StartFailure,
    failure_of,
    forget_failure,
    raise_again,
    read_failure,
    record_failure,
)
from kvasir_workers.pool.start_notice import NOTICE_VARIABLE, read_notice, remove_notice

LASTING = EngineStartError("pool decode does not start: x", remedy="lower y", permanent=True)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Ray's key-value store."""
    store: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert overwrite
        store[key] = value

    def get(key: bytes, *, namespace: bytes) -> bytes | None:
        return store.get(key)

    def delete(key: bytes, *, namespace: bytes) -> None:
        store.pop(key, None)

    monkeypatch.setattr(failures, "_internal_kv_put", put)
    monkeypatch.setattr(failures, "_internal_kv_get", get)
    monkeypatch.setattr(failures, "_internal_kv_del", delete)
    return store


def test_the_newest_failure_of_a_pool_is_read_until_it_is_forgotten(kept: dict[bytes, bytes]) -> None:
    assert read_failure("kvasir", "decode") is None
    record_failure("kvasir", "decode", failure_of(LASTING, "/logs/d.log"))
    assert read_failure("kvasir", "decode") == StartFailure(
        "pool decode does not start: x", "lower y", permanent=True, log="/logs/d.log", repeat=True
    )
    assert read_failure("kvasir", "prefill") is None
    forget_failure("kvasir", "decode")
    assert read_failure("kvasir", "decode") is None


def test_a_permanent_error_is_raised_again_once_and_then_tried_anew(kept: dict[bytes, bytes]) -> None:
    record_failure("kvasir", "decode", failure_of(LASTING, ""))
    with pytest.raises(EngineStartError) as caught:
        raise_again("kvasir", "decode")
    assert (caught.value.message, caught.value.remedy) == (LASTING.message, LASTING.remedy)
    raise_again("kvasir", "decode")
    still = read_failure("kvasir", "decode")
    assert still is not None
    assert still.permanent


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineStartError("pool decode does not start: busy"), "pool decode does not start: busy"),
        (ConfigError("port 7001 is in use"), "port 7001 is in use"),
        (RuntimeError("it does not fit"), "it does not fit"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_that_may_pass_is_recorded_and_not_raised_again(
    kept: dict[bytes, bytes], error: Exception, message: str
) -> None:
    record_failure("kvasir", "decode", failure_of(error, "/l"))
    raise_again("kvasir", "decode")
    assert read_failure("kvasir", "decode") == StartFailure(message, log="/l")


def test_an_unreadable_record_is_no_failure_and_an_absent_store_does_not_hide_the_error(
    kept: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept[failures.failure_key("kvasir", "decode")] = b"{"
    assert read_failure("kvasir", "decode") is None

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Ray does not answer")

    monkeypatch.setattr(failures, "_internal_kv_put", gone)
    record_failure("kvasir", "decode", failure_of(LASTING, ""))


@pytest.mark.usefixtures("kept")
def test_the_pods_startup_probe_knows_a_failure_until_a_replica_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = {NOTICE_VARIABLE: str(tmp_path / "notice")}
    monkeypatch.setenv(NOTICE_VARIABLE, notice[NOTICE_VARIABLE])
    record_failure("kvasir", "decode", failure_of(LASTING, ""))
    assert read_notice(notice) == "pool decode does not start: x; lower y"
    # A pod in which nothing has failed yet gets the replica that raises the error again.
    remove_notice(notice)
    with pytest.raises(EngineStartError):
        raise_again("kvasir", "decode")
    assert read_notice(notice) == "pool decode does not start: x; lower y"
    forget_failure("kvasir", "decode")
    assert read_notice(notice) == ""
