"""Settings of the garbage collector: what exists is left alone, and cycles are found all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvasir.collector import freeze_gc


class Node:
    """An object in a cycle, as a closed connection is."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_what_exists_is_no_longer_visited_and_new_cycles_are_freed_after_some_thousands() -> None:
    kept = Node()
    freeze_gc()
    assert gc.get_freeze_count() > 0
    assert all(each is not kept for each in gc.get_objects())
    one, other = Node(), Node()
    one.other, other.other = other, one
    alive = weakref.ref(one)
    del one, other
    made = 0
    more = []
    while alive() is not None and made < 20_000:
        more.append(Node())
        made += 1
    assert 1_000 < made < 20_000
