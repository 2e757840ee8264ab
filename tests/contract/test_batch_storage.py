"""Contract of the storage of files and batches, and of the leases on the work: in a folder, in a
bucket of an S3 server, in Redis."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.kit.lab.redis_server import RedisServer
from tests.kit.lab.s3_server import ENVIRONMENT, S3Server

from kvasir.config.spec.redis import LeaseRedisSpec, S3ServerSpec
from kvasir.core.errors import CapacityError, ConfigError
from kvasir.ports.storage import ObjectStorage, WorkLease
from kvasir_platform.gateway.batches.storage.local_storage import FileLease, LocalStorage
from kvasir_platform.gateway.batches.storage.redis_lease import TTL_S, RedisLease
from kvasir_platform.gateway.batches.storage.s3_lease import CALL_S, RENEW_S, S3Lease
from kvasir_platform.gateway.batches.storage.s3_lease import TTL_S as S3_TTL_S
from kvasir_platform.gateway.batches.storage.s3_storage import S3Storage

MIB = 1 << 20


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    if request.param == "folder":
        return LocalStorage(tmp_path / "objects")
    server: S3Server = request.getfixturevalue("s3")
    return S3Storage.at(f"s3://{server.bucket()}/a-prefix/of-ours", server.spec)


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


@pytest.mark.parametrize("pieces", [1, 9])
def test_an_object_stays_as_it_was_where_pieces_fail(storage: ObjectStorage, pieces: int) -> None:
    def failing() -> Iterator[bytes]:
        yield from [bytes(MIB)] * pieces
        raise CapacityError("no more", code="storage_unavailable")

    storage.put("a/1", [b"old"])
    with pytest.raises(CapacityError, match="no more"):
        storage.put("a/1", failing())
    assert storage.get("a/1") == b"old"


def test_a_large_object_is_stored_in_parts_and_none_is_left_of_one_that_fails(s3: S3Server) -> None:
    def failing() -> Iterator[bytes]:
        yield from [bytes(MIB)] * 9
        raise CapacityError("no more", code="storage_unavailable")

    bucket = s3.bucket()
    storage = S3Storage.at(f"s3://{bucket}", s3.spec)
    storage.put("a/1", (bytes([number]) * MIB for number in range(9)))
    assert storage.get("a/1") == b"".join(bytes([number]) * MIB for number in range(9))
    tagged = storage.tagged("a/1")
    assert tagged is not None
    assert tagged[1].endswith('-2"')  # S3's tag of an object of two parts
    with pytest.raises(CapacityError):
        storage.put("a/2", failing())
    assert (storage.names("a"), s3.unfinished(bucket)) == (["1"], 0)


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


def test_a_bucket_that_does_not_exist_is_named_at_the_start(s3: S3Server) -> None:
    storage = S3Storage.at("s3://not-there/prefix", s3.spec)
    for check in (storage.check, lambda: storage.check_writes("me", conditional=True)):
        with pytest.raises(ConfigError, match="there is no bucket not-there; create it"):
            check()
    with pytest.raises(CapacityError):
        storage.get("a/1")


def test_credentials_that_are_refused_or_missing_are_named_at_the_start(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.bucket()
    with s3.refuse_strangers(), pytest.raises(ConfigError, match=r"InvalidAccessKeyId.*AWS_\*"):
        S3Storage.at(f"s3://{bucket}", s3.spec).check()
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no credentials for S3; set AWS_ACCESS_KEY_ID"):
        S3Storage.at(f"s3://{bucket}", s3.spec, limit_s=0.5).check()


def test_a_server_that_does_not_answer_is_no_fault_of_the_spec(s3: S3Server) -> None:
    away = S3Storage.at("s3://bucket", S3ServerSpec(endpoint="http://127.0.0.1:1"), limit_s=0.5)
    with pytest.raises(CapacityError, match=r"127\.0\.0\.1:1"):
        away.check()
    with pytest.raises(CapacityError):
        away.put("a/1", [b"x"])


def test_a_server_that_ignores_conditions_needs_redis_for_leases(s3: S3Server) -> None:
    class Careless(S3Storage):
        def create(self, key: str, content: bytes) -> str | None:
            self.put(key, [content])
            return "tag"

    bucket = s3.bucket()
    S3Storage.at(f"s3://{bucket}", s3.spec).check_writes("me", conditional=True)
    careless = Careless.at(f"s3://{bucket}", s3.spec)
    careless.check_writes("me", conditional=False)
    with pytest.raises(ConfigError, match=r"set gateway\.batches\.redis"):
        careless.check_writes("me", conditional=True)
    assert careless.names("checks") == []


def test_an_authority_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.batches\.s3 cannot be used"):
        S3Storage.at("s3://bucket", S3ServerSpec(ca_file=str(tmp_path / "none.pem")))


def bucket_of_leases(server: S3Server) -> S3Storage:
    return S3Storage.at(f"s3://{server.bucket()}", server.spec, limit_s=CALL_S)


@pytest.fixture(params=["files", "redis", "s3"])
def leases(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], WorkLease]:
    """Returns what makes the leases of one more process."""
    if request.param == "files":
        return lambda: FileLease(tmp_path / "leases")
    if request.param == "s3":
        objects = bucket_of_leases(request.getfixturevalue("s3"))
        return lambda: S3Lease(objects, uuid.uuid4().hex, lambda: 0.0)
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


def test_one_of_many_processes_gets_a_lease(leases: Callable[[], WorkLease]) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: leases().take("work"), range(8)))
    assert len([token for token in tokens if token is not None]) == 1


def test_a_lease_in_a_bucket_goes_to_another_once_it_is_not_renewed(s3: S3Server) -> None:
    now, objects = [0.0], bucket_of_leases(s3)
    one, other = (S3Lease(objects, name, lambda: now[0]) for name in ("one", "other"))
    assert one.take("work") == 1
    assert other.take("work") is None
    for _ in range(12):
        now[0] += RENEW_S
        assert one.keep("work")
        assert other.take("work") is None
    now[0] += S3_TTL_S - 0.1
    assert other.take("work") is None
    now[0] += 0.2
    assert other.take("work") == 2
    assert not one.keep("work")
    one.release("work", done=True)
    now[0] += RENEW_S
    assert other.keep("work")


class LossyStorage(S3Storage):
    """Whose answers are lost: `heard` calls are done and answered, then `lost` are done; others are not
    done."""

    heard = 0
    lost = 0

    def replace(self, key: str, content: bytes, tag: str) -> str | None:
        if self.heard:
            self.heard -= 1
            return super().replace(key, content, tag)
        if self.lost:
            self.lost -= 1
            super().replace(key, content, tag)
        raise CapacityError("no answer", code="storage_unavailable")


def test_a_lease_survives_a_server_whose_answers_are_lost_for_a_while(s3: S3Server) -> None:
    now = [0.0]
    objects = LossyStorage.at(f"s3://{s3.bucket()}", s3.spec)
    one = S3Lease(objects, "one", lambda: now[0])
    assert one.take("work") == 1
    now[0], objects.lost = RENEW_S, 1
    assert one.keep("work")
    now[0], objects.heard = RENEW_S + 1, 2
    assert one.keep("work")
    now[0] += S3_TTL_S / 2 - 0.1
    assert one.keep("work")
    now[0] += 0.2
    assert not one.keep("work")
