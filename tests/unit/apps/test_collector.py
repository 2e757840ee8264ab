"""Settings of the garbage collector while a process starts, and after it has started."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvasir.collector import freeze_gc, gc_paused


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def nodes() -> int:
    return sum(type(each) is Node for each in gc.get_objects())


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_loaded_is_not_looked_at_again() -> None:
    loaded: list[object] = []
    freeze_gc()
    later: list[object] = []
    seen = {id(each) for each in gc.get_objects()}
    assert id(later) in seen
    assert id(loaded) not in seen


def test_garbage_from_before_is_gone_and_later_garbage_is_found() -> None:
    Node()
    freeze_gc()
    gc.unfreeze()
    assert nodes() == 0
    freeze_gc()
    Node()
    assert nodes() == 1
    gc.collect()
    assert nodes() == 0


def test_nothing_is_collected_while_it_is_paused_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
