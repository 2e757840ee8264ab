"""The native tree and its twin agree after any operations; and what the tree refuses."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from kvasir import native
from kvasir.core.kv import KvEventKind, Medium
from kvasir.native import SLOTS, PrefixTree, _twin

pytestmark = pytest.mark.filterwarnings("error")


def stored(parent: int, names: array[int], medium: int = Medium.DEVICE, rank: int = 0) -> bytes:
    return _twin.record(KvEventKind.STORED, medium, rank, parent, names)


def removed(names: array[int], medium: int = Medium.DEVICE, rank: int = 0) -> bytes:
    return _twin.record(KvEventKind.REMOVED, medium, rank, 0, names)


def depths(tree: Any, names: array[int], groups: int = 8) -> list[list[int]]:
    """For each group the four cumulative depths."""
    out = array("I", bytes(16 * groups))
    tree.match(names, out)
    return [list(out[4 * group : 4 * group + 4]) for group in range(groups)]


class Pair:
    """The two implementations, given the same commands. Group numbers may differ, since sweeping does."""

    def __init__(self, rng: Random) -> None:
        capacity = rng.choice([30, 200, 1_000_000])
        predicted = min(capacity, rng.choice([0, 5, 40, 1000]))
        self.trees: tuple[Any, Any] = (PrefixTree(capacity, predicted), _twin.PrefixTree(capacity, predicted))
        self.groups: tuple[list[int], list[int]] = ([], [])

    def both(self, method: str, *args: Any) -> Any:
        """Call both with equal arguments, and compare what comes of it."""
        return self._compare([self._try(tree, method, *args) for tree in self.trees], method)

    def grouped(self, method: str, at: int, *args: Any) -> Any:
        """The same with the group at a position first."""
        results = [
            self._try(tree, method, groups[at], *args)
            for tree, groups in zip(self.trees, self.groups, strict=True)
        ]
        return self._compare(results, method)

    def applied(self, log: bytes) -> None:
        """A log with the ranks' groups."""
        results = [
            self._try(tree, "apply", groups, log)
            for tree, groups in zip(self.trees, self.groups, strict=True)
        ]
        self._compare(results, "apply")

    def add(self) -> None:
        for tree, groups in zip(self.trees, self.groups, strict=True):
            groups.append(tree.add_group())

    def drop(self, at: int) -> None:
        for tree, groups in zip(self.trees, self.groups, strict=True):
            tree.drop_group(groups.pop(at))

    def check(self, names: array[int]) -> None:
        """Both are sound and say the same of `names` and of their own sizes."""
        for tree in self.trees:
            tree.check_integrity()
        seen = [depths(tree, names, 64) for tree in self.trees]
        for mine, twins in zip(*self.groups, strict=True):
            assert seen[0][mine] == seen[1][twins]
            for slot in range(SLOTS):
                assert self.trees[0].held(mine, slot) == self.trees[1].held(twins, slot)
        native_stats, twin_stats = (tree.stats() for tree in self.trees)
        for field in ("blocks", "predicted_blocks", "groups", "expired", "evicted"):
            assert getattr(native_stats, field) == getattr(twin_stats, field), field

    @staticmethod
    def _try(tree: Any, method: str, *args: Any) -> Any:
        try:
            return getattr(tree, method)(*args)
        except OverflowError:
            return "full"

    @staticmethod
    def _compare(results: list[Any], method: str) -> Any:
        assert results[0] == results[1], method
        return results[0]


def random_log(rng: Random, random_chain: Any, ranks: int) -> bytes:
    log = b""
    for _ in range(rng.randrange(1, 4)):
        rank, medium, chain = rng.randrange(ranks), rng.choice([0, 0, 0, 1, 2, 3]), random_chain(rng)
        what = rng.random()
        if what < 0.55:
            begin = rng.randrange(len(chain))
            end = rng.randrange(begin, len(chain) + 1)
            log += stored(chain[begin - 1] if begin else 7, chain[begin:end], medium, rank)
        elif what < 0.95:
            log += removed(array("Q", rng.sample(list(chain), rng.randrange(len(chain)))), medium, rank)
        else:
            log += _twin.record(KvEventKind.CLEARED, medium, rank, 0, array("Q"))
    return log


def history(seed: int, random_chain: Any) -> Pair:  # noqa: C901 - one branch for each command
    rng = Random(seed)
    pair = Pair(rng)
    predictions: list[tuple[int, array[int], int]] = []
    now = 0.0
    for _ in range(rng.choice([30, 120])):
        now += rng.random()
        what = rng.random()
        if what < 0.08 or not pair.groups[0]:
            if len(pair.groups[0]) < 4:
                pair.add()
        elif what < 0.12:
            gone = rng.randrange(len(pair.groups[0]))
            pair.drop(gone)
            predictions = [(at - (at > gone), *rest) for at, *rest in predictions if at != gone]  # type: ignore[misc]
        elif what < 0.18:
            for tree in pair.trees:
                tree.sweep(rng.randrange(1, 40))
        elif what < 0.6:
            pair.applied(random_log(rng, random_chain, len(pair.groups[0])))
        elif what < 0.75:
            at, names = rng.randrange(len(pair.groups[0])), random_chain(rng)[: rng.randrange(41)]
            predictions.append((at, names, pair.grouped("predict", at, names, now)))
        elif what < 0.88 and predictions:
            at, names, number = predictions.pop(rng.randrange(len(predictions)))
            pair.grouped("settle", at, names, number)
        elif what < 0.92:
            pair.both("expire", now - 6 * rng.random())
        pair.check(random_chain(rng))
    return pair


def test_the_native_module_was_built() -> None:
    assert native.IS_NATIVE


@pytest.mark.parametrize("seed", range(60))
def test_tree_and_twin_agree_after_every_step(seed: int, random_chain: Any) -> None:
    history(seed, random_chain)


@pytest.mark.slow
def test_tree_and_twin_agree_after_every_step_of_two_thousand_histories(random_chain: Any) -> None:
    for seed in range(60, 2060):
        history(seed, random_chain)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_exported_in_parts_is_what_is_held(seed: int, random_chain: Any) -> None:
    pair, rng = history(seed, random_chain), Random(seed)
    for mine, twins in zip(*pair.groups, strict=True):
        copy = PrefixTree(1_000_000, 0)
        group, cursor = copy.add_group(), 0
        while cursor >= 0:
            log, cursor = pair.trees[0].export(mine, 0, cursor, rng.randrange(1, 30))
            copy.apply([group], log)
        assert [copy.held(group, m) for m in Medium] == [pair.trees[1].held(twins, m) for m in Medium]
        chain = random_chain(rng)
        without_predictions = _twin.PrefixTree(1_000_000, 0)
        reference = without_predictions.add_group()
        cursor = 0
        while cursor >= 0:
            log, cursor = pair.trees[1].export(twins, 0, cursor, 1)
            without_predictions.apply([reference], log)
        assert depths(copy, chain)[group] == depths(without_predictions, chain)[reference]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_left_when_every_group_was_dropped_and_swept(seed: int, random_chain: Any) -> None:
    pair = history(seed, random_chain)
    tree = pair.trees[0]
    for group in pair.groups[0]:
        tree.drop_group(group)
    while tree.sweep(50):
        tree.check_integrity()
    tree.check_integrity()
    stats = tree.stats()
    assert (stats.blocks, stats.names, stats.nodes, stats.groups, stats.unswept) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("tree", [PrefixTree(100, 10), _twin.PrefixTree(100, 10)], ids=["native", "twin"])
class TestEither:
    """What both implementations promise alike."""

    def test_a_dropped_group_vanishes_at_once_and_its_number_waits_for_the_sweep(self, tree: Any) -> None:
        group, names = tree.add_group(), array("Q", [11, 12, 13])
        tree.apply([group], stored(0, names))
        tree.drop_group(group)
        assert depths(tree, names)[group] == [0, 0, 0, 0]
        other = tree.add_group()
        assert other != group
        while tree.sweep(1):
            pass
        again = tree.add_group()
        assert again == group
        tree.drop_group(again)
        tree.drop_group(other)

    def test_a_malformed_log_changes_nothing(self, tree: Any) -> None:
        group, names = tree.add_group(), array("Q", [21, 22])
        good = stored(0, names)
        for bad in (good + b"\x01", good[:-1], good + b"\x09" + bytes(7), good + bytes([1, 4]) + bytes(14)):
            with pytest.raises(ValueError, match="log"):
                tree.apply([group], bad)
        with pytest.raises(KeyError):
            tree.apply([group], good + stored(0, names, rank=1))
        assert tree.held(group, Medium.DEVICE) == 0
        tree.drop_group(group)

    def test_a_lower_tier_continues_what_the_device_begins(self, tree: Any) -> None:
        group, names = tree.add_group(), array("Q", [31, 32, 33, 34])
        tree.apply([group], stored(0, names[:2]) + stored(32, names[2:3], Medium.DISK))
        tree.apply([group], stored(33, names[3:], Medium.CPU))
        assert depths(tree, names)[group] == [2, 2, 4, 4]
        tree.drop_group(group)

    def test_buffers_of_another_width_are_refused(self, tree: Any) -> None:
        group = tree.add_group()
        with pytest.raises(ValueError, match="8-byte"):
            tree.match(array("I", [1, 2]), array("I", bytes(64)))
        with pytest.raises(ValueError, match="depths"):
            tree.match(array("Q", [1]), array("I"))
        tree.drop_group(group)

    def test_a_group_that_does_not_exist_is_an_error(self, tree: Any) -> None:
        for method, args in (("drop_group", ()), ("held", (0,)), ("export", (0, 0, 1))):
            with pytest.raises(KeyError):
                getattr(tree, method)(99, *args)
        assert tree.settle(99, array("Q", [1]), 1) == 0


def test_groups_are_bounded() -> None:
    tree = PrefixTree(10, 0)
    for _ in range(8191):
        tree.add_group()
    with pytest.raises(OverflowError, match="8191 groups"):
        tree.add_group()


def test_a_block_in_the_middle_may_be_missing_and_come_back() -> None:
    tree = PrefixTree(1000, 0)
    group, names = tree.add_group(), array("Q", range(100, 140))
    tree.apply([group], stored(0, names))
    tree.apply([group], removed(names[17:18]))
    assert depths(tree, names)[group][0] == 17
    tree.apply([group], stored(names[16], names[17:18]))
    assert depths(tree, names)[group][0] == 40


def test_memory_is_given_back_and_used_again() -> None:
    tree = PrefixTree(1_000_000, 0)
    group, rng = tree.add_group(), Random(1)
    sizes = []
    for _ in range(20):
        names = array("Q", (rng.getrandbits(64) for _ in range(20_000)))
        tree.apply([group], stored(0, names))
        sizes.append(tree.stats().bytes)
        tree.apply([group], removed(names))
        assert tree.stats().nodes == 0
    assert sizes[-1] <= 1.3 * sizes[1]


_GOLDEN = 0x9E3779B97F4A7C15
"""What the native table multiplies names with: see hash.hpp."""


def test_names_of_one_shard_of_the_table_are_found_however_close_their_places_are() -> None:
    # A name's product selects its shard with the top 12 bits, and its place there with the 32 bits below.
    inverse, mask = pow(_GOLDEN, -1, 2**64), 2**64 - 1
    for seed in range(100):
        rng = Random(seed)
        places = {
            rng.choice([rng.randrange(64) << 26, 2**32 - 1]) << 20 | rng.randrange(4) for _ in range(150)
        }
        names = array("Q", rng.sample([place * inverse & mask for place in sorted(places)], len(places)))
        tree = PrefixTree(1_000_000, 0)
        group = tree.add_group()
        for begin in range(0, len(names), 5):
            parent = names[begin - 1] if begin else 0
            tree.apply([group], stored(parent, names[begin : begin + 5]))
        tree.check_integrity()
        assert depths(tree, names)[group][0] == len(names)
        gone = array("Q", rng.sample(list(names), rng.randrange(len(names) + 1)))
        tree.apply([group], removed(gone))
        tree.check_integrity()
        left = next((at for at, name in enumerate(names) if name in set(gone)), len(names))
        assert depths(tree, names)[group][0] == left


def test_names_in_sequence_are_taken_in_like_any_others() -> None:
    tree = PrefixTree(1_000_000, 0)
    group, names = tree.add_group(), array("Q", range(1, 200_001))
    tree.apply([group], stored(0, names))
    assert depths(tree, names)[group][0] == 200_000


def test_memory_is_back_where_it_was_when_all_is_removed() -> None:
    tree, rng = PrefixTree(1_000_000, 1000), Random(2)
    group = tree.add_group()
    before = tree.stats().bytes
    for _ in range(3):
        names = array("Q", (rng.getrandbits(64) for _ in range(50_000)))
        tree.apply([group], stored(0, names))
        assert tree.stats().bytes > 10 * before
        tree.apply([group], removed(names))
        assert tree.stats().bytes <= before + 4096


def test_a_boundless_sweep_sweeps_everything() -> None:
    tree = PrefixTree(1_000_000, 0)
    group = tree.add_group()
    tree.apply([group], stored(0, array("Q", range(1, 1000))))
    tree.drop_group(group)
    assert tree.sweep(2**63) == 0


def test_owners_that_come_and_go_within_one_log_do_not_run_out() -> None:
    tree = PrefixTree(1_000_000, 0)
    group, cleared = tree.add_group(), _twin.record(KvEventKind.CLEARED, 0, 0, 0, array("Q"))
    tree.apply([group], (stored(0, array("Q", [1])) + cleared) * 70_000)
    tree.check_integrity()
    assert tree.held(group, Medium.DEVICE) == 0
