"""After any batches, snapshots, and changes of workers and routers, the router's view at rest equals the
workers' caches, and no lookup fails on the way."""

from __future__ import annotations

import pytest
from tests.kit.cores import over_cores
from tests.kit.index.histories import Played, play

from kvasir.core.kv import KvState


def test_two_thousand_random_histories_end_with_the_workers_truth() -> None:
    played = play(range(2_000))
    assert played.failed == {}
    assert min(played.seen[state] for state in KvState) > 5_000
    assert min(played.faults[kind] for kind in ("lost", "repeated", "reordered")) > 50


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_histories_end_with_the_workers_truth() -> None:
    played = Played.sum(over_cores(play, range(100_000)))
    assert played.failed == {}
    assert min(played.seen[state] for state in KvState) > 500_000
