"""The head's GCS is restarted while that can help, and not afterwards."""

from __future__ import annotations

import pytest

from kvasir_platform.cluster.ray.head_keeper import HeadKeeper, RestartBackoff


class Head:
    """A head that is up until a test says otherwise. `lasts`: whether one that is started again stays."""

    def __init__(self) -> None:
        self.alive = True
        self.gcs_alive = True
        self.lasts = True
        self.started_at: list[float] = []
        self.now = 0.0

    def restart_gcs(self) -> None:
        self.started_at.append(self.now)
        self.gcs_alive = self.lasts


def run(keeper: HeadKeeper, head: Head, until_s: float) -> None:
    while head.now < until_s:
        keeper.step(head.now)
        head.now += 0.25


@pytest.fixture
def head() -> Head:
    return Head()


def test_a_lost_head_is_started_again_at_once(head: Head) -> None:
    keeper = HeadKeeper(head)
    run(keeper, head, 5.0)
    head.gcs_alive = False
    run(keeper, head, 10.0)
    assert head.started_at == [5.0]
    assert keeper.failure is None


def test_one_that_does_not_stay_is_tried_at_growing_pauses_and_given_up_within_rays_patience(
    head: Head,
) -> None:
    keeper = HeadKeeper(head)
    head.gcs_alive = head.lasts = False
    run(keeper, head, 100.0)
    pauses = [late - early for early, late in zip(head.started_at, head.started_at[1:], strict=False)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert head.started_at[-1] < 60.0
    assert keeper.failure is not None
    assert "ended 6 times within 300 s" in keeper.failure


def test_losses_far_apart_are_each_mended(head: Head) -> None:
    keeper = HeadKeeper(head, RestartBackoff(limit=2, window_s=100.0))
    for loss in range(6):
        head.gcs_alive = False
        run(keeper, head, 60.0 * (loss + 1))
    assert len(head.started_at) == 6
    assert keeper.failure is None


def test_a_lost_node_is_told_and_nothing_is_started(head: Head) -> None:
    keeper = HeadKeeper(head)
    head.alive = head.gcs_alive = False
    run(keeper, head, 5.0)
    assert head.started_at == []
    assert keeper.failure is not None
    assert "every replica on it" in keeper.failure
