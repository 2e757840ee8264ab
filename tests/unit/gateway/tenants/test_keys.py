"""API keys: hashes in files, folders and the environment, reloaded on change, kept if a change is invalid."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from kvasir.config.spec.edge import GatewaySpec
from kvasir.core.errors import ConfigError, RequestError
from kvasir_platform.gateway.tenants.key_ring import KeyRing
from kvasir_platform.gateway.tenants.keys import KeyText, key_line, new_key, parse_keys, read_sources

TENANTS = frozenset({"default", "red", "blue"})
NOW_S = 1_800_000_000.0
SECRET = b"0" * 32


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def ring(
    gateway: GatewaySpec, environment: dict[str, str] | None = None, wall: Callable[[], float] = lambda: NOW_S
) -> KeyRing:
    return KeyRing(lambda: read_sources(gateway, environment or {}), TENANTS, wall)


def in_file(path: Path, text: str) -> KeyRing:
    path.write_text(text)
    return ring(GatewaySpec(api_keys_file=str(path)))


def tenant(keys: KeyRing, key: str) -> str | None:
    """Whose key it is, None for nobody's."""
    try:
        return keys.tenant(f"Bearer {key}".encode())
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


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic a", b"a", b"Bearer\ta"])
def test_what_is_no_bearer_token_is_no_key(header: bytes | None, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        in_file(tmp_path / "keys", hashed("a")).tenant(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_the_scheme_is_matched_in_any_case_and_around_spaces(tmp_path: Path) -> None:
    assert in_file(tmp_path / "keys", hashed("a")).tenant(b"bEARER  a ") == "default"


def test_a_key_is_good_until_its_expiry(tmp_path: Path) -> None:
    now = NOW_S
    moment = datetime.fromtimestamp(NOW_S + 10, timezone(timedelta(hours=5)))
    (tmp_path / "keys").write_text(key_line("a", "red", moment))
    keys = ring(GatewaySpec(api_keys_file=str(tmp_path / "keys")), wall=lambda: now)
    now = NOW_S + 9.9
    assert tenant(keys, "a") == "red"
    now = NOW_S + 10
    with pytest.raises(RequestError) as caught:
        keys.tenant(b"Bearer a")
    assert (caught.value.status, caught.value.code) == (401, "api_key_expired")


def test_what_the_command_line_prints_is_what_the_gateway_reads() -> None:
    key = new_key()
    line = key_line(key, "red", datetime(2031, 2, 3, tzinfo=UTC))
    assert line.endswith(" tenant=red expires=2031-02-03T00:00:00Z")
    assert key not in line
    known = parse_keys([KeyText("line", "default", line)], TENANTS)
    assert known[hashlib.sha256(key.encode()).digest()] == (
        "red",
        datetime(2031, 2, 3, tzinfo=UTC).timestamp(),
    )
    assert new_key() != key


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
