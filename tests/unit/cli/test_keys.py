"""`kvasir keys`, and what `kvasir check` reports about the files of keys."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from kvasir.config.load.loader import load
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.preflight.named_files import probe_named_files
from kvasir_platform.gateway.tenants.keys import KeyText, parse_keys


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
