"""Which workers hold which adapters, decided from what they report."""

from __future__ import annotations

import pytest

from kvasir.core.adapters import HeldAdapter
from kvasir.core.errors import CapacityError, RequestError
from kvasir_router.adapters.placement import AdapterWorker, choose, missing_copies, wanted

POOLS = ("prefill", "decode")


def held(name: str, replicas: int = 0, digest: str = "d", *, retiring: bool = False) -> HeldAdapter:
    return HeldAdapter(name, f"/a/{name}", replicas, digest, 8, 100, retiring)


def worker(name: str, *adapters: HeldAdapter, ready: bool = True, connected: bool = True) -> AdapterWorker:
    return AdapterWorker(name, name.split("-", maxsplit=1)[0], ready, connected, adapters)


FLEET = [worker("prefill-0"), worker("prefill-1"), worker("decode-0"), worker("decode-1")]


def test_all_workers_of_each_pool_or_the_emptiest_of_them_are_chosen() -> None:
    assert choose(FLEET, POOLS, 0, 4) == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    loaded = [worker("prefill-0", held("a")), worker("prefill-1"), worker("decode-0"), worker("decode-1")]
    assert choose(loaded, POOLS, 1, 4) == ["prefill-1", "decode-0"]


def test_workers_that_take_no_work_are_not_chosen_and_a_pool_without_any_is_named() -> None:
    fleet = [worker("prefill-0"), worker("decode-0", ready=False)]
    with pytest.raises(CapacityError, match="Pool decode has 0 ready workers"):
        choose(fleet, POOLS, 0, 4)


def test_a_full_worker_is_named_by_its_pool() -> None:
    with pytest.raises(RequestError, match="Pool prefill has 0 workers with room"):
        choose([worker("prefill-0", held("a")), worker("decode-0")], POOLS, 0, 1)


def test_a_new_worker_misses_what_all_should_hold() -> None:
    adapter = held("a")
    fleet = [worker("prefill-0", adapter), worker("decode-0", adapter), worker("decode-1")]
    assert missing_copies(fleet, POOLS, 4) == [("decode-1", adapter)]
    assert missing_copies(fleet, POOLS, 4, busy={"a"}) == []


def test_a_subset_is_filled_up_and_not_enlarged() -> None:
    one = held("a", replicas=1)
    assert missing_copies([worker("prefill-0", one), worker("decode-0", one), *FLEET[1:2]], POOLS, 4) == []
    assert missing_copies([worker("prefill-0", one), worker("decode-1")], POOLS, 4) == [("decode-1", one)]


def test_a_copy_on_a_worker_that_may_come_back_counts() -> None:
    one = held("a", replicas=1)
    away = worker("decode-0", one, ready=False, connected=False)
    assert missing_copies([worker("prefill-0", one), away, worker("decode-1")], POOLS, 4) == []


def test_full_workers_are_left_alone() -> None:
    adapters = [held("a"), held("b")]
    fleet = [worker("prefill-0", *adapters), worker("decode-0", *adapters), worker("decode-1", held("c"))]
    assert [name for name, _ in missing_copies(fleet, ("decode",), 2)] == ["decode-1"]


def test_what_is_being_unloaded_anywhere_is_not_restored() -> None:
    fleet = [worker("prefill-0", held("a")), worker("decode-0", held("a", retiring=True)), worker("decode-1")]
    assert wanted(fleet) == {}
    assert missing_copies(fleet, POOLS, 4) == []


def test_of_two_contents_under_one_name_that_of_most_workers_counts() -> None:
    old, new = held("a", digest="old"), held("a", digest="new")
    fleet = [worker("prefill-0", new), worker("prefill-1", old), worker("decode-0", new)]
    assert wanted(fleet) == {"a": new}
