"""Losses that a cluster brings, at a small size, with real processes: of nodes in network namespaces, of
certificates, and upgrades on a real Ray, some of them with real engines.
`tests/simulation/test_node_losses.py` has those of nodes in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from load_tests.scenarios.cluster import real
from load_tests.scenarios.cluster.certificates import Renewals, renewed_under_load
from load_tests.scenarios.cluster.losses import Load
from load_tests.scenarios.cluster.nodes import RESUME_WINDOW_S, Cut, Drained, cut_off, drained
from load_tests.scenarios.cluster.releases import Upgrade, never_starts, two_in_a_row
from load_tests.scenarios.scorecard.common import Figure, Trial
from tests.kit.lab import netns
from tests.kit.programs import program

pytestmark = [pytest.mark.soak, pytest.mark.slow]

FEW = Load(rate=8.0, before_s=1.0, after_s=1.0)


def assert_exact(figures: list[Figure]) -> None:
    """No request failed, and no token was lost, repeated or wrong; how long a pause was is for the
    benchmark."""
    assert [
        (each.what, each.note) for each in figures if each.unit != "s" and each.value != each.target
    ] == []
    assert {each.what for each in figures} >= {"failed requests", "longest gap of a stream"}


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Cut(cut_s=4.0, load=FEW), id="while its processes live"),
        pytest.param(Cut(cut_s=6.0, replaced=True, load=FEW), id="and replaced"),
        pytest.param(Cut(cut_s=RESUME_WINDOW_S + 2.0, replaced=True, load=FEW), id="and replaced long ago"),
    ],
)
async def test_a_node_that_is_cut_off_and_comes_back_changes_no_stream(tmp_path: Path, size: Cut) -> None:
    program("ip")
    if (missing := netns.available()) is not None:
        pytest.skip(missing)
    assert_exact(await cut_off(Trial(tmp_path, 31, quiet=True), size))


async def test_a_drain_of_the_only_decode_replica_fails_no_request(tmp_path: Path) -> None:
    assert_exact(await drained(Trial(tmp_path, 32, quiet=True), Drained(away_s=1.0, load=FEW)))


async def test_certificates_that_are_renewed_under_load_fail_no_request(tmp_path: Path) -> None:
    size = Renewals(between_s=1.0, load=FEW)
    assert_exact(await renewed_under_load(Trial(tmp_path, 33, quiet=True), size))


@pytest.mark.parametrize("upgrade", [two_in_a_row, never_starts])
async def test_upgrades_on_a_real_ray_fail_no_request(
    tmp_path: Path, upgrade: Callable[[Trial, Upgrade], Awaitable[list[Figure]]]
) -> None:
    program("redis-server")
    assert_exact(await upgrade(Trial(tmp_path, 34, quiet=True), Upgrade()))


async def test_real_engines_lose_no_stream_to_a_drain_of_the_only_decode_replica(tmp_path: Path) -> None:
    program("redis-server")
    assert_exact(await real.drained(Trial(tmp_path, 35, quiet=True), real.Loss(away_s=1.0)))


async def test_real_engines_lose_no_stream_to_an_upgrade_that_never_starts_and_its_rollback(
    tmp_path: Path,
) -> None:
    program("redis-server")
    size = Upgrade(load=real.Loss().load)
    assert_exact(await real.never_starts(Trial(tmp_path, 36, quiet=True), size))
