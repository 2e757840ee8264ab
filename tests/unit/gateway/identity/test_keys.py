"""API keys: hashes in files, folders and the environment, reloaded on change, kept if a change is invalid."""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvasir.clock import MonotonicClock
from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.tenants import ALL_SCOPES, Scope
from kvasir.core.errors import ConfigError, RequestError
from kvasir_platform.gateway.identity.authenticator import Authenticator
from kvasir_platform.gateway.identity.identities import Identity
from kvasir_platform.gateway.identity.key_ring import KeyRing
from kvasir_platform.gateway.identity.keys import (
    KeyEntry,
    KeyText,
    key_line,
    new_key,
    parse_keys,
    read_sources,
)

TENANTS = frozenset({"default", "red", "blue"})
NOW_S = 1_800_000_000.0
SECRET = b"0" * 32


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def ring(gateway: GatewaySpec, environment: dict[str, str] | None = None) -> KeyRing:
    return KeyRing(lambda: read_sources(gateway, environment or {}), TENANTS)


def identity(keys: KeyRing, header: bytes | None, now_s: float = NOW_S) -> Identity:
    return Authenticator(keys, None, MonotonicClock(), lambda: now_s).identity(header)


def in_file(path: Path, text: str) -> KeyRing:
    path.write_text(text)
    return ring(GatewaySpec(api_keys_file=str(path)))


def tenant(keys: KeyRing, key: str, now_s: float = NOW_S) -> str | None:
    """Whose key it is, None for nobody's."""
    try:
        return identity(keys, f"Bearer {key}".encode(), now_s).tenant
    except RequestError as error:
        if (error.status, error.code) != (401, "invalid_api_key"):
            raise
        return None


def test_a_line_says_whose_a_key_is_and_a_tenant_may_have_several(tmp_path: Path) -> None:
    text = f"# all\n\n{hashed('a')} # alice\n {hashed('b').upper()} tenant=red\n{hashed('c')}\ttenant=red\n"
    keys = in_file(tmp_path / "keys", text)
    assert [tenant(keys, key) for key in ("a", "b", "c", "d", "", "# all")] == [
        "default", "red", "red", None, None, None,
    ]  # fmt: skip


def test_a_key_is_named_by_the_begin_of_its_hash(tmp_path: Path) -> None:
    keys = in_file(tmp_path / "keys", hashed("a"))
    assert identity(keys, b"Bearer a").key == hashed("a")[:12]


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic a", b"a", b"Bearer\ta"])
def test_what_is_no_bearer_token_is_no_key(header: bytes | None, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        identity(in_file(tmp_path / "keys", hashed("a")), header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_the_scheme_is_matched_in_any_case_and_around_spaces(tmp_path: Path) -> None:
    assert identity(in_file(tmp_path / "keys", hashed("a")), b"bEARER  a ").tenant == "default"


def test_a_key_is_good_until_its_expiry(tmp_path: Path) -> None:
    keys = in_file(tmp_path / "keys", f"{hashed('a')} tenant=red expires=2027-01-15T13:00:10+05:00")
    until_s = datetime(2027, 1, 15, 8, 0, 10, tzinfo=UTC).timestamp()
    assert tenant(keys, "a", until_s - 0.1) == "red"
    with pytest.raises(RequestError) as caught:
        identity(keys, b"Bearer a", until_s)
    assert (caught.value.status, caught.value.code) == (401, "api_key_expired")


def test_what_the_command_line_stores_is_what_the_gateway_reads() -> None:
    key = new_key()
    digest = hashlib.sha256(key.encode()).digest()
    until_s = datetime(2031, 2, 3, tzinfo=UTC).timestamp()
    entry = KeyEntry("red", until_s, frozenset((Scope.EMBEDDINGS, Scope.INFERENCE)), NOW_S)
    line = key_line(digest, entry)
    assert line.endswith(
        " tenant=red scopes=embeddings+inference created=2027-01-15T08:00:00Z expires=2031-02-03T00:00:00Z"
    )
    assert key not in line
    assert parse_keys([KeyText("line", "default", line)], TENANTS) == {digest: entry}
    assert new_key() != key


def test_a_key_without_scopes_has_all_of_them(tmp_path: Path) -> None:
    keys = in_file(tmp_path / "keys", f"{hashed('a')}\n{hashed('b')} scopes=operator:read")
    assert identity(keys, b"Bearer a").scopes == ALL_SCOPES
    assert identity(keys, b"Bearer b").scopes == {Scope.OPERATOR_READ}


@pytest.mark.parametrize(
    "line",
    [
        "sk-kvasir-secret",
        hashed("a")[:-1],
        hashed("a") + "0",
        f"{hashed('a')} red",
        f"{hashed('a')} tenant=",
        f"{hashed('a')} tenant=red tenant=blue",
        f"{hashed('a')} owner=sk-kvasir-secret",
        f"{hashed('a')} expires=soon",
        f"{hashed('a')} expires=2030-01-31T00:00:00",
        f"{hashed('a')} scopes=inference,embeddings",
        f"{hashed('a')} scopes=everything",
        f"{hashed('a')} created=soon",
        f"{hashed('a')} tenant=green",
        f"{hashed('good')} tenant=blue",
    ],
)
def test_a_broken_line_is_named_and_not_shown(line: str) -> None:
    text = f"{hashed('good')} tenant=red\n{line}\n"
    with pytest.raises(ConfigError, match=r"^/keys:2: ") as caught:
        parse_keys([KeyText("/keys", "default", text)], TENANTS)
    assert "secret" not in str(caught.value)
    assert hashed("a")[:8] not in str(caught.value)


def test_the_same_line_twice_is_no_fault() -> None:
    line = f"{hashed('a')} tenant=red\n"
    assert len(parse_keys([KeyText("/a", "default", line), KeyText("/b", "red", line)], TENANTS)) == 1


def test_the_environment_holds_lines_or_a_list() -> None:
    value = f"{hashed('a')},{hashed('b')} tenant=red\n{hashed('c')} tenant=blue"
    keys = ring(GatewaySpec(api_keys_env="KEYS"), {"KEYS": value})
    assert [tenant(keys, key) for key in "abc"] == ["default", "red", "blue"]
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_env: the environment variable KEYS is not set"):
        ring(GatewaySpec(api_keys_env="KEYS"), {"OTHER": value})


def test_all_sources_count_together(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(hashed("a"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "red").write_text(hashed("b"))
    gateway = GatewaySpec(
        api_keys_file=str(tmp_path / "file"), api_keys_dir=str(tmp_path / "folder"), api_keys_env="KEYS"
    )
    keys = ring(gateway, {"KEYS": hashed("c")})
    assert [tenant(keys, key) for key in "abc"] == ["default", "red", "default"]


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "binary"])
def test_a_file_that_is_none_is_a_config_error_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "binary":
            path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file"):
        ring(GatewaySpec(api_keys_file=str(path)))


class Mount:
    """A folder as Kubernetes mounts a secret: links into `..data`, which is replaced in one step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        folder.mkdir()

    def put(self, **files: str) -> None:
        """The next version."""
        self.version += 1
        inner = self.folder / f"..version_{self.version}"
        inner.mkdir()
        for name, text in files.items():
            (inner / name).write_text(text)
        (self.folder / "..data_tmp").symlink_to(inner.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")

    def forget(self, version: int) -> None:
        inner = self.folder / f"..version_{version}"
        for file in inner.iterdir():
            file.unlink()
        inner.rmdir()


def test_a_mounted_secret_names_tenants_by_its_files_and_is_taken_over_when_swapped(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "mount")
    mount.put(red=hashed("old"), blue=f"{hashed('b')}\n{hashed('guest')} tenant=default")
    keys = ring(GatewaySpec(api_keys_dir=str(mount.folder)))
    assert [tenant(keys, key) for key in ("old", "b", "guest")] == ["red", "blue", "default"]
    mount.put(red=f"{hashed('old')}\n{hashed('new')}", blue="")
    mount.forget(1)
    assert tenant(keys, "new") is None
    keys.refresh()
    assert [tenant(keys, key) for key in ("old", "new", "b", "guest")] == ["red", "red", None, None]


def test_a_swap_in_the_middle_of_reading_gives_one_version_and_no_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mount = Mount(tmp_path / "mount")
    mount.put(blue=hashed("b1"), red=hashed("r1"))
    keys = ring(GatewaySpec(api_keys_dir=str(mount.folder)))
    mount.put(blue=hashed("b2"), red=hashed("r2"))
    listed = Path.iterdir
    swapped: list[Path] = []

    def swap(folder: Path) -> object:
        names = list(listed(folder))
        if not swapped:
            swapped.append(folder)
            mount.put(blue=hashed("b3"), red=hashed("r3"))
            mount.forget(2)
        return iter(names)

    monkeypatch.setattr(Path, "iterdir", swap)
    keys.refresh()
    assert swapped
    assert [tenant(keys, key) for key in ("b1", "b2", "r2", "b3", "r3")] == [None, None, None, "blue", "red"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_broken_change_keeps_the_keys_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    keys = in_file(path, hashed("a"))

    def errors() -> int:
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    path.write_text(f"{hashed('b')}\nsk-kvasir-secret")
    for _ in range(3):
        keys.refresh()
    assert (tenant(keys, "a"), tenant(keys, "b"), errors()) == ("default", None, 1)
    path.unlink()
    for _ in range(3):
        keys.refresh()
    assert (tenant(keys, "a"), errors()) == ("default", 2)
    path.write_text(hashed("b"))
    keys.refresh()
    assert (tenant(keys, "a"), tenant(keys, "b"), errors()) == (None, "default", 2)
    path.write_text("broken")
    keys.refresh()
    assert errors() == 3
    assert "secret" not in caplog.text
    assert hashed("b")[:8] not in caplog.text


def test_a_change_is_seen_whatever_the_file_says_of_its_time_and_size(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = in_file(path, hashed("a"))
    before = path.stat()
    with path.open("r+") as file:
        file.write(hashed("b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.refresh()
    assert (tenant(keys, "a"), tenant(keys, "b")) == (None, "default")


def test_the_table_is_looked_up_by_a_digest_that_only_this_process_can_make(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(hashed("a"))
    one, other = (ring(GatewaySpec(api_keys_file=str(path))) for _ in range(2))
    assert set(one._keys).isdisjoint(other._keys)
    assert bytes.fromhex(hashed("a")) not in {*one._keys, *other._keys}
