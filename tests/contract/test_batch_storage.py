"""Contract of the storage of files and batches, and of the leases on the work: in a folder, through fsspec,
in Redis."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.lab.redis_server import RedisServer

from kvasir.config.spec.redis import LeaseRedisSpec
from kvasir.core.errors import CapacityError, ConfigError
from kvasir.ports.storage import ObjectStorage, WorkLease
from kvasir_platform.gateway.batches.storage.local_storage import FileLease, LocalStorage
from kvasir_platform.gateway.batches.storage.object_storage import UrlStorage
from kvasir_platform.gateway.batches.storage.redis_lease import TTL_S, RedisLease


@pytest.fixture(params=["folder", "fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    if request.param == "folder":
        return LocalStorage(tmp_path / "objects")
    return UrlStorage(f"memory://{uuid.uuid4().hex}/prefix")


def test_an_object_is_read_as_it_was_stored_and_replaced_as_a_whole(storage: ObjectStorage) -> None:
    storage.put("a/b/c.json", [b"one", b"two"])
    assert storage.get("a/b/c.json") == b"onetwo"
    storage.put("a/b/c.json", [b"x"])
    assert storage.get("a/b/c.json") == b"x"


def test_names_are_those_directly_below_a_folder_in_order(storage: ObjectStorage) -> None:
    assert storage.names("a") == []
    for key in ("a/2", "a/1", "a/b/3", "c/4"):
        storage.put(key, [b""])
    assert [name for name in storage.names("a") if name != "b"] == ["1", "2"]


def test_an_object_that_is_removed_is_gone(storage: ObjectStorage) -> None:
    storage.put("a/1", [b"x"])
    storage.remove("a/1")
    storage.remove("a/1")
    assert storage.get("a/1") is None
    assert storage.names("a") == []


def test_an_object_whose_pieces_fail_is_not_there(storage: ObjectStorage, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise CapacityError("no more", code="storage_unavailable")

    with pytest.raises(CapacityError):
        storage.put("a/1", pieces())
    assert storage.get("a/1") is None
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]


@pytest.mark.parametrize("step", ["open", "makedirs"])
def test_an_object_stays_as_it_was_where_the_file_system_fails(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("away")

    storage = UrlStorage(f"memory://{uuid.uuid4().hex}")
    storage.put("a/1", [b"old"])
    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.memory.MemoryFileSystem." + step, fail)
        with pytest.raises(CapacityError):
            storage.put("a/1", [b"new"])
    assert storage.get("a/1") == b"old"


def test_a_folder_without_objects_is_not_kept(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for key in ("a/b/1", "a/b/2"):
        storage.put(key, [b"x"])
    storage.remove("a/b/1")
    assert storage.names("a/b") == ["2"]
    storage.remove("a/b/2")
    assert os.listdir(tmp_path / "a") == []
    storage.put("a/b/3", [b"x"])
    assert storage.names("a/b") == ["3"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(CapacityError) as refused:
        LocalStorage(tmp_path).put("a/1", [b"x"])
    assert refused.value.code == "storage_unavailable"


def test_a_file_system_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install"):
        UrlStorage("nothing-like-it://bucket")


@pytest.fixture(params=["files", "redis"])
def leases(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], WorkLease]:
    """Returns what makes the leases of one more process."""
    if request.param == "files":
        return lambda: FileLease(tmp_path / "leases")
    server: RedisServer = request.getfixturevalue("redis")
    spec = LeaseRedisSpec(url=server.url, namespace=f"t{uuid.uuid4().hex[:8]}")
    return lambda: RedisLease(spec, uuid.uuid4().hex, lambda: 0.0)


def test_one_process_has_a_lease_and_the_next_a_larger_token(leases: Callable[[], WorkLease]) -> None:
    one, other = leases(), leases()
    first = one.take("work")
    assert first is not None
    assert other.take("work") is None
    assert one.keep("work")
    assert not other.keep("work")
    assert other.take("more work") is not None
    one.release("work", done=False)
    assert not one.keep("work")
    second = other.take("work")
    assert second is not None
    assert second > first


def test_work_that_is_done_leaves_nothing_to_hold(leases: Callable[[], WorkLease]) -> None:
    one = leases()
    one.take("work")
    one.release("work", done=True)
    one.release("work", done=True)
    assert leases().take("work") is not None


def test_a_lease_lasts_while_redis_is_away_until_others_may_take_it(
    tmp_path: Path, redis: RedisServer
) -> None:
    now = [0.0]
    spec = LeaseRedisSpec(url="redis://127.0.0.1:1/0", timeout_s=0.1)
    live = RedisLease(LeaseRedisSpec(url=redis.url, namespace="away"), "one", lambda: now[0])
    assert live.take("work") is not None
    away = RedisLease(spec, "one", lambda: now[0])
    away._kept_s["work"] = 0.0
    now[0] = TTL_S / 2 - 1
    assert away.keep("work")
    now[0] = TTL_S / 2
    assert not away.keep("work")
