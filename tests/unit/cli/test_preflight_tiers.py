"""`kvasir check` says which tiers cannot be used from here, and stops nothing for their sake."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvasir.config.loader import load
from kvasir.config.spec import Deployment
from kvasir_platform.control.preflight import ModelProbe, replica_bytes
from kvasir_platform.control.preflight_tiers import TierProbe, probe_tiers, troubles

GB = 10**9
REDIS = "tiers.redis.url=redis://127.0.0.1:1"


def disk(path: Path, size: int = GB) -> Deployment:
    return load(None, [f"tiers.disk.path={path}", f"tiers.disk.bytes={size}"])


def test_a_folder_that_can_be_made_is_fine(tmp_path: Path) -> None:
    deployment = disk(tmp_path / "not" / "there", 1 << 20)
    found = probe_tiers(deployment.tiers)
    assert (found.disk_problem, found.disk_free > 0) == ("", True)
    assert not list(troubles(deployment, found))
    assert not (tmp_path / "not").exists()


def test_something_else_of_that_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    deployment = disk(tmp_path / "file" / "kv")
    ((check, error, message, remedy),) = troubles(deployment, probe_tiers(deployment.tiers))
    assert (check, error) == ("disk", True)
    assert "file is not a folder" in message
    assert "tiers.disk.path" in remedy


def test_a_folder_that_may_not_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs this may be root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    deployment = disk(tmp_path)
    ((_, error, message, _),) = troubles(deployment, probe_tiers(deployment.tiers))
    assert (error, "cannot be written" in message) == (False, True)


def test_the_space_of_all_engines_together_is_compared_with_what_is_free() -> None:
    deployment = disk(Path("/kv"), 3 * GB)
    assert not list(troubles(deployment, TierProbe(disk_free=6 * GB)))
    ((_, error, message, remedy),) = troubles(deployment, TierProbe(disk_free=5 * GB))
    assert (error, remedy.startswith("lower tiers.disk.bytes")) == (False, True)
    assert "6.0 GB, and 5.0 GB are free" in message


def test_a_redis_that_does_not_answer_is_a_warning_and_one_that_does_is_fine() -> None:
    silent = load(None, [REDIS])
    ((check, error, message, _),) = troubles(silent, probe_tiers(silent.tiers))
    assert (check, error) == ("redis", False)
    assert "127.0.0.1:1 does not answer" in message
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = load(None, [f"tiers.redis.url=redis://127.0.0.1:{server.getsockname()[1]}/0"])
        assert not list(troubles(answering, probe_tiers(answering.tiers)))


def test_the_arena_counts_as_memory_of_each_engine() -> None:
    plain = load(None)
    tiered = load(None, [f"tiers.cpu.bytes={GB}"])
    pool, model = plain.pools[0], ModelProbe()
    assert replica_bytes(tiered, pool, model) - replica_bytes(plain, pool, model) == GB
