"""Membership records: live while their heartbeat advances, ignored if malformed."""

from __future__ import annotations

import pytest

from kvasir.core.errors import ProtocolError
from kvasir.core.membership import Liveness, MemberRecord, is_worker_address


def _record(beat: int, worker: str = "w1") -> MemberRecord:
    return MemberRecord(worker_id=worker, address="127.0.0.1:1", pool="decode", pid=1, beat=beat)


def test_a_record_survives_its_encoding() -> None:
    assert MemberRecord.decode(_record(7).encode()) == _record(7)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"worker_id":1}', b"\xff", b"null"])
def test_anything_but_a_record_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="member record"):
        MemberRecord.decode(raw)


def test_a_worker_is_live_while_its_beat_moves() -> None:
    liveness = Liveness(stale_s=5)
    for second in range(20):
        live = liveness.live({"w1": _record(second)}, now=float(second))
        assert [endpoint.worker_id for endpoint in live] == ["w1"]


def test_a_worker_whose_beat_stands_still_goes_stale_and_returns_with_the_next_beat() -> None:
    liveness = Liveness(stale_s=5)
    assert liveness.live({"w1": _record(1)}, now=0.0)
    assert liveness.live({"w1": _record(1)}, now=4.9)
    assert not liveness.live({"w1": _record(1)}, now=5.0)
    assert liveness.live({"w1": _record(2)}, now=6.0)


def test_only_records_that_have_long_been_stale_may_be_removed() -> None:
    liveness = Liveness(stale_s=5)
    liveness.live({"w1": _record(1), "w2": _record(1, "w2")}, now=0.0)
    liveness.live({"w1": _record(1), "w2": _record(2, "w2")}, now=60.0)
    assert liveness.long_stale(now=100.0, age_s=90) == ["w1"]


def test_a_withdrawn_record_is_forgotten() -> None:
    liveness = Liveness(stale_s=5)
    liveness.live({"w1": _record(1)}, now=0.0)
    assert not liveness.live({}, now=1.0)
    assert liveness.long_stale(now=1000.0, age_s=1) == []


@pytest.mark.parametrize(
    "address", ["10.0.0.7:7001", "worker-0.workers:7001", "[fd00::7]:7001", "localhost:1"]
)
def test_a_host_and_a_port_are_a_workers_address(address: str) -> None:
    assert is_worker_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "http://host:80",
        "dns://1.2.3.4:53/host:80",
        "unix:7001",
        "unix:/run/docker.sock:1",
        "user@host:80",
        "host:80/path:1",
        "2130706433:80",
        "127.1:80",
        "[host]:80",
        "169.254.169.254:80",
        "[fe80::1]:80",
        "224.0.0.1:80",
    ],
)
def test_what_may_be_dialed_as_something_else_is_no_workers_address(address: str) -> None:
    assert not is_worker_address(address)
    record = MemberRecord("w1", address, "decode", pid=1, beat=1)
    with pytest.raises(ProtocolError):
        MemberRecord.decode(record.encode())
