"""API keys: hashes in a file, read again on change, and kept when a change is broken."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvasir.core.errors import ConfigError, RequestError
from kvasir_platform.gateway.auth import ApiKeys


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def accepts(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check(f"Bearer {key}".encode())
    except RequestError as error:
        if (error.status, error.code) != (401, "invalid_api_key"):
            raise
        return False
    return True


def test_comments_and_blank_lines_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# all\n\n{hashed('a')} # alice\n  {hashed('b').upper()}\n")
    keys = ApiKeys(path, lambda: 0.0)
    assert [accepts(keys, key) for key in ("a", "b", "c", "", "# all")] == [True, True, False, False, False]


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        ApiKeys(tmp_path / "none", lambda: 0.0)


def test_a_line_that_is_no_hash_is_named_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{hashed('a')}\nsk-plain-secret\n")
    with pytest.raises(ConfigError, match="keys:2") as caught:
        ApiKeys(path, lambda: 0.0)
    assert "plain-secret" not in str(caught.value)


def test_changes_are_read_within_a_second_and_broken_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(hashed("a"))
    now = 0.0
    keys = ApiKeys(path, lambda: now)
    path.write_text(hashed("b"))
    os.utime(path, ns=(1, 1))
    assert accepts(keys, "a")
    now = 1.0
    assert accepts(keys, "b")
    assert not accepts(keys, "a")
    path.write_text("broken")
    now = 2.0
    assert accepts(keys, "b")
    path.unlink()
    now = 3.0
    assert accepts(keys, "b")
