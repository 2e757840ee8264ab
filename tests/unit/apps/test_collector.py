"""What the garbage collector is told once a process has started."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvasir_platform.apps.collector import YOUNG, leave_alone_what_is_here


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_is_loaded_is_not_looked_at_again() -> None:
    loaded: list[object] = []
    leave_alone_what_is_here()
    later: list[object] = []
    seen = {id(each) for each in gc.get_objects()}
    assert id(later) in seen
    assert id(loaded) not in seen


def test_garbage_from_the_start_is_gone_and_later_garbage_is_found_in_bounds() -> None:
    class Node:
        pass

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    del node
    leave_alone_what_is_here()
    assert not any(isinstance(each, Node) for each in gc.get_objects())
    counted = gc.get_stats()[0]["collections"]
    kept = [[number] for number in range(2 * YOUNG)]
    assert gc.get_stats()[0]["collections"] - counted in (1, 2)
    assert len(kept) == 2 * YOUNG
