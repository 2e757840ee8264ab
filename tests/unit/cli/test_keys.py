"""`kvasir keys`, and what `kvasir check` reports about the files of keys."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.load.loader import load
from kvasir.config.spec.tenants import Scope
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.preflight.named_files import probe_named_files
from kvasir_platform.gateway.identity.keys import KeyEntry, KeyText, parse_keys


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """A key and its line."""
    assert main(["-o", "json", "keys", "new", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    return result["key"], result["line"]


def test_a_new_key_opens_what_its_line_is_put_into(capsys: pytest.CaptureFixture[str]) -> None:
    key, line = made(capsys, "--tenant", "research", "--days", "30")
    [(hashed, entry)] = parse_keys([KeyText("file", "default", line)], {"research"}).items()
    assert hashed == hashlib.sha256(key.encode()).digest()
    assert entry.tenant == "research"
    assert entry.expires_s < float("inf")
    assert parse_keys([KeyText("file", "x", made(capsys)[1])], {"default"})
    assert made(capsys)[0] != key


def test_people_are_shown_both_and_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new"]) == 0
    text = capsys.readouterr().out
    key = text.split()[1]
    assert key.startswith("sk-kvasir-")
    assert text.count(key) == 1
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert "api_keys_file" in text


@pytest.mark.parametrize("arguments", [["--tenant", "No One"], ["--tenant", "a" * 41], ["--days", "0"]])
def test_what_cannot_be_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


STORED = """
tenancy: {tenants: [{name: research}]}
gateway: {api_keys_file: KEYS}
"""


class Stored:
    """A file of keys of a spec, and the command that changes it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], *, spec: str = STORED) -> None:
        self.path = folder / "keys"
        self.spec = folder / "kvasir.yaml"
        self.spec.write_text(spec.replace("KEYS", str(self.path)))
        self._capsys = capsys

    def run(self, *arguments: str) -> Any:
        assert main(["-o", "json", "keys", *arguments, "-f", str(self.spec)]) == 0
        return json.loads(self._capsys.readouterr().out)

    def failed(self, *arguments: str) -> str:
        assert main(["keys", *arguments, "-f", str(self.spec)]) == 2
        return self._capsys.readouterr().err

    def entries(self) -> dict[bytes, KeyEntry]:
        return parse_keys([KeyText("file", "default", self.path.read_text())], {"research", "default"})


@pytest.fixture
def stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Stored:
    return Stored(tmp_path, capsys)


def test_a_created_key_is_stored_by_its_hash_for_its_owner_alone(stored: Stored) -> None:
    made = stored.run("create", "--tenant", "research", "--days", "30", "--scopes", "embeddings")
    [(hashed, entry)] = stored.entries().items()
    assert hashed == hashlib.sha256(made["key"].encode()).digest()
    assert hashed.hex().startswith(made["id"])
    assert (entry.tenant, entry.scopes) == ("research", frozenset((Scope.EMBEDDINGS,)))
    assert entry.created_s is not None
    assert entry.expires_s - entry.created_s == 30 * 86_400
    assert made["key"] not in stored.path.read_text()
    assert stat.S_IMODE(stored.path.stat().st_mode) == 0o600


def test_keys_are_listed_without_what_opens_anything(stored: Stored) -> None:
    stored.path.write_text(f"# ours\n{'a' * 64} expires=2020-01-01T00:00:00Z\n\n{'b' * 64} tenant=research\n")
    made = stored.run("create")
    listed = stored.run("list")
    assert [(key["id"], key["tenant"], key["state"]) for key in listed] == [
        ("a" * 12, "default", "expired"),
        (made["id"], "default", "active"),
        ("b" * 12, "research", "active"),
    ]
    assert made["key"] not in json.dumps(listed)


def test_a_revoked_key_is_gone_and_all_else_in_the_file_stays(stored: Stored) -> None:
    stored.path.write_text(f"# ours\n{'a' * 64} # alice\n{'B' * 64} tenant=research # bob\n")
    stored.path.chmod(0o640)
    [gone] = stored.run("revoke", "bbbbbb")
    assert gone["tenant"] == "research"
    assert stored.path.read_text() == f"# ours\n{'a' * 64} # alice\n"
    assert stat.S_IMODE(stored.path.stat().st_mode) == 0o640
    assert "there is no key" in stored.failed("revoke", "bbbbbb")


def test_a_rotated_key_and_its_successor_are_both_valid_for_the_overlap(stored: Stored) -> None:
    old = stored.run("create", "--tenant", "research", "--days", "30", "--scopes", "inference,embeddings")
    new = stored.run("rotate", old["id"], "--overlap", "2h")
    by_id = {hashed.hex()[:12]: entry for hashed, entry in stored.entries().items()}
    was, is_now = by_id[old["id"]], by_id[new["id"]]
    assert is_now.created_s is not None
    assert was.expires_s == is_now.created_s + 7200
    assert is_now.expires_s == is_now.created_s + 30 * 86_400
    assert (is_now.tenant, is_now.scopes) == (was.tenant, was.scopes)
    assert new["replaces"] == old["id"]


def test_a_rotation_never_makes_a_key_live_longer(stored: Stored) -> None:
    stored.path.write_text(f"{'a' * 64} expires=2020-01-01T00:00:00Z\n")
    stored.run("rotate", "aaaaaa", "--days", "7")
    assert "expires=2020-01-01T00:00:00Z" in stored.path.read_text()


def test_a_successor_is_not_unlimited_because_the_line_has_no_time_of_creation(stored: Stored) -> None:
    stored.path.write_text(f"{'a' * 64} expires=2099-01-01T00:00:00Z\n")
    assert "--days" in stored.failed("rotate", "aaaaaa")
    stored.path.write_text(f"{'a' * 64}\n")
    assert stored.run("rotate", "aaaaaa")["expires"] is None


def test_in_a_folder_each_tenant_has_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").mkdir()
    stored = Stored(tmp_path, capsys, spec=STORED.replace("api_keys_file", "api_keys_dir"))
    made = stored.run("create", "--tenant", "research")
    assert made["source"] == str(stored.path / "research")
    assert stored.run("list")[0]["id"] == made["id"]


def test_a_mounted_secret_is_left_to_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = Stored(tmp_path, capsys, spec=STORED.replace("api_keys_file", "api_keys_dir"))
    (stored.path / "..v1").mkdir(parents=True)
    (stored.path / "..v1" / "research").write_text("a" * 64)
    (stored.path / "..data").symlink_to("..v1")
    (stored.path / "research").symlink_to("..data/research")
    assert stored.run("list")[0]["id"] == "a" * 12
    for arguments in (("create", "--tenant", "research"), ("revoke", "aaaaaa"), ("rotate", "aaaaaa")):
        assert "mounted Secret" in stored.failed(*arguments)
    assert (stored.path / "research").read_text() == "a" * 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "--tenant", "nobody"), "no such tenant"),
        (("create", "--scopes", "inference,all"), "--scopes 'all'"),
        (("create", "--keys-file", "/nowhere/keys"), "No such file"),
        (("revoke", "xyz"), "no id of a key"),
        (("rotate", "aaaaaa"), "kvasir keys list"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(arguments: tuple[str, ...], said: str, stored: Stored) -> None:
    assert said in stored.failed(*arguments)
    assert not stored.path.exists()


def test_a_spec_without_a_file_of_keys_says_where_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = Stored(tmp_path, capsys, spec="gateway: {}")
    assert "--keys-file" in stored.failed("create")
    made = stored.run("create", "--keys-file", str(tmp_path / "other"))
    assert made["source"] == str(tmp_path / "other")


def test_the_check_reads_keys_as_the_gateway_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{'0' * 64} tenant=research"
    (tmp_path / "keys").write_text(line)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "research").write_text("0" * 64)
    monkeypatch.setenv("GOOD_KEYS", line)

    def problems(*overrides: str) -> dict[str, str]:
        deployment = load(None, ["tenancy.tenants=[{name: research}]", *overrides])
        return {file.field: file.problem for file in probe_named_files(deployment, os.environ, 0.0)}

    assert problems(
        f"gateway.api_keys_file={tmp_path / 'keys'}",
        f"gateway.api_keys_dir={tmp_path / 'folder'}",
        "gateway.api_keys_env=GOOD_KEYS",
    ) == {"gateway.api_keys_file": "", "gateway.api_keys_dir": "", "gateway.api_keys_env": ""}
    (tmp_path / "keys").write_text(f"{line}x")
    (tmp_path / "folder" / "research").unlink()
    found = problems(
        f"gateway.api_keys_file={tmp_path / 'keys'}",
        f"gateway.api_keys_dir={tmp_path / 'folder'}",
        "gateway.api_keys_env=NO_KEYS",
        f"tenancy.cache_secret_file={tmp_path / 'none'}",
    )
    assert "keys:1: tenancy.tenants has no 'researchx'" in found["gateway.api_keys_file"]
    assert found["gateway.api_keys_dir"] == "holds no key"
    assert "the environment variable NO_KEYS is not set" in found["gateway.api_keys_env"]
    assert "No such file" in found["tenancy.cache_secret_file"]
