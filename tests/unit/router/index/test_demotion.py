"""Index contents of a worker that is not EXACT any more."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, KvState, Medium
from kvasir.ports.routing import RoutingTarget
from kvasir_router.index import FleetIndex, IndexMode

MakeIdentity = Callable[..., WorkerIdentity]
PROMPT = array("Q", (11, 12, 13))
TARGET = RoutingTarget("w")


@pytest.fixture
def index(make_identity: MakeIdentity) -> FleetIndex:
    made = FleetIndex(capacity_blocks=1000, predicted_blocks=1000, predicted_ttl_s=100.0)
    made.add("w", make_identity("w"), IndexMode.HYBRID, 0.0)
    return made


def hit(index: FleetIndex) -> int:
    return int(index.match(PROMPT)[index.group(TARGET), Medium.DEVICE])


def test_of_one_that_keeps_nothing_nothing_is_foreseen(index: FleetIndex) -> None:
    index.predict(TARGET, PROMPT, 1.0)
    assert hit(index) == 3
    index.demote("w", "it appears to cache nothing", 2.0, void=True)
    assert hit(index) == 0
    assert index.predict(TARGET, PROMPT, 3.0) == 0
    assert hit(index) == 0
    index.check_integrity()


def test_one_that_never_reported_is_named_and_its_predictions_stand(index: FleetIndex) -> None:
    index.predict(TARGET, PROMPT, 1.0)
    index.demote("w", "often wrong", 2.0)
    status = index.status("w")
    assert status is not None
    assert (status.state, status.reason) == (KvState.PREDICTED, "often wrong")
    assert hit(index) == 3


@pytest.mark.parametrize("void", [False, True])
def test_one_that_reported_is_believed_and_foreseen_again_from_its_next_epoch(
    make_identity: MakeIdentity, void: bool
) -> None:
    index = FleetIndex(capacity_blocks=1000, predicted_blocks=1000, predicted_ttl_s=100.0)
    index.add("w", replace(make_identity("w"), reports_kv=True), IndexMode.HYBRID, 0.0)
    index.apply("w", KvBatch(1, 1, b""), 1.0)
    index.demote("w", "often wrong", 1.5, void=void)
    index.apply("w", KvBatch(1, 2, b""), 2.0)
    picture = index.picture("w")
    assert picture is not None
    assert picture.state is KvState.PREDICTED
    assert bool(index.predict(TARGET, PROMPT, 2.0)) is not void
    index.apply("w", KvBatch(2, 1, b""), 3.0)
    picture = index.picture("w")
    assert picture is not None
    assert (picture.state, picture.epoch, picture.resyncs) == (KvState.CATCHING_UP, 2, 1)
    assert index.predict(TARGET, PROMPT, 3.0) > 0
    index.check_integrity()
