"""`kvasir check` reports tiers that cannot be used from here, as warnings only."""

from __future__ import annotations

import os
import socket
from errno import EACCES
from pathlib import Path

import pytest

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import replica_bytes
from kvasir_platform.cluster.preflight.machine_facts import ModelProbe
from kvasir_platform.cluster.preflight.tiers import (
    BucketProbe,
    TierProbe,
    bucket_findings,
    probe_bucket,
    probe_tiers,
    tier_findings,
)

GB = 10**9
REDIS = "tiers.redis.url=redis://127.0.0.1:1"


def disk(path: Path, size: int = GB) -> Deployment:
    return load(None, [f"tiers.disk.path={path}", f"tiers.disk.bytes={size}"])


def troubles(deployment: Deployment, found: TierProbe) -> list[Finding]:
    return [finding for finding in tier_findings(deployment, found) if finding.level != "ok"]


def test_a_folder_that_can_be_made_is_fine(tmp_path: Path) -> None:
    deployment = disk(tmp_path / "not" / "there", 1 << 20)
    found = probe_tiers(deployment.tiers)
    assert (found.disk_problem, found.disk_free > 0) == ("", True)
    (finding,) = tier_findings(deployment, found)
    assert (finding.check, finding.level) == ("tiers", "ok")
    assert not (tmp_path / "not").exists()


def test_something_else_of_that_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    deployment = disk(tmp_path / "file" / "kv")
    (finding,) = troubles(deployment, probe_tiers(deployment.tiers))
    assert (finding.check, finding.level) == ("disk", "error")
    assert "file is not a folder" in finding.message
    assert "tiers.disk.path" in finding.remedy


def test_a_folder_that_may_not_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs this may be root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    deployment = disk(tmp_path)
    (finding,) = troubles(deployment, probe_tiers(deployment.tiers))
    assert (finding.level, "cannot be written" in finding.message) == ("warning", True)


def test_a_folder_below_one_that_may_not_be_searched_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def searching(path: str | Path, **kwargs: bool) -> os.stat_result:
        if tmp_path in Path(path).parents:
            raise PermissionError(EACCES, "Permission denied", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(os, "stat", searching)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    deployment = disk(tmp_path / "closed" / "kv")
    (finding,) = troubles(deployment, probe_tiers(deployment.tiers))
    assert (finding.level, f"{tmp_path} cannot be written" in finding.message) == ("warning", True)


def test_the_space_of_all_engines_together_is_compared_with_what_is_free() -> None:
    deployment = disk(Path("/kv"), 3 * GB)
    assert not troubles(deployment, TierProbe(disk_free=6 * GB))
    (finding,) = troubles(deployment, TierProbe(disk_free=5 * GB))
    assert (finding.level, finding.remedy.startswith("lower tiers.disk.bytes")) == ("warning", True)
    assert "6.0 GB, and 5.0 GB are free" in finding.message


def test_a_redis_that_does_not_answer_is_a_warning_and_one_that_does_is_fine() -> None:
    silent = load(None, [REDIS])
    (finding,) = troubles(silent, probe_tiers(silent.tiers))
    assert (finding.check, finding.level) == ("redis", "warning")
    assert "127.0.0.1:1 does not answer" in finding.message
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = load(None, [f"tiers.redis.url=redis://127.0.0.1:{server.getsockname()[1]}/0"])
        assert not troubles(answering, probe_tiers(answering.tiers))


def test_the_arena_counts_as_memory_of_each_engine() -> None:
    plain = load(None)
    tiered = load(None, [f"tiers.cpu.bytes={GB}"])
    pool, model = plain.pools[0], ModelProbe()
    assert replica_bytes(tiered, pool, model) - replica_bytes(plain, pool, model) == GB


def test_a_bucket_is_read_from_here_and_its_server_may_be_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    silent = load(
        None, ["gateway.batches.storage=s3://bucket/a", "gateway.batches.s3.endpoint=http://127.0.0.1:1"]
    )
    found = probe_bucket(silent.gateway.batches)
    (finding,) = bucket_findings(silent, found)
    assert (finding.check, finding.level) == ("batches", "warning")
    assert "127.0.0.1:1" in finding.message
    (finding,) = bucket_findings(silent, BucketProbe("no bucket", "create it", refused=True))
    assert (finding.level, finding.remedy) == ("error", "create it")
    (finding,) = bucket_findings(silent, BucketProbe())
    assert (finding.level, finding.message) == ("ok", "s3://bucket/a can be read")
    assert probe_bucket(load(None).gateway.batches) == BucketProbe()
    assert not list(bucket_findings(load(None), BucketProbe()))
