"""The path of an engine's KV events, and the resulting state."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import CapacityError, ConfigError
from kvasir_workers.engines.vllm.events.cache_record import CacheRecord


def record() -> CacheRecord:
    deployment = Deployment()
    return CacheRecord(deployment, deployment.pools[0], MonotonicClock())


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    short = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


async def test_events_travel_where_only_the_worker_may_look_and_nothing_is_left(temporary: Path) -> None:
    made = record()
    made.open(5)
    (directory,) = temporary.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    made.close()
    made.close()
    assert list(temporary.iterdir()) == []


async def test_until_the_engine_has_spoken_the_record_is_incomplete(temporary: Path) -> None:
    made = record()
    made.open(5)
    made.flush()
    with pytest.raises(CapacityError, match="the engine starts"):
        await anext(made.holdings.snapshot())
    made.close()


async def test_a_directory_too_long_for_a_socket_is_refused_with_the_remedy(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        record().open(5)
    assert list(deep.iterdir()) == []
