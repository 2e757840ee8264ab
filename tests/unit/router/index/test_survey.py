"""What a survey of the index finds: common beginnings of cached prompts, by the tokens that sharing saves."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from kvasir.core.kv import KvEventKind
from kvasir.ports.router import SharedPrefix
from kvasir_router.index.survey import MOST_BLOCKS, SLICE_BLOCKS, PrefixSurvey

SYSTEM = list(range(100, 110))


def stored(names: Sequence[int], parent: int = 0) -> bytes:
    head = struct.pack("<BBHI", KvEventKind.STORED, 0, 0, len(names))
    return head + array("Q", [parent, *names]).tobytes()


def largest(survey: PrefixSurvey, most: int = 50) -> list[SharedPrefix]:
    found: list[SharedPrefix] = []
    for _ in survey.largest(most, found):
        assert not found
    return found


def test_a_common_beginning_is_found_with_all_that_hold_it() -> None:
    survey = PrefixSurvey()
    survey.add("a", stored(SYSTEM) + stored([1, 2], SYSTEM[-1]) + stored([3], SYSTEM[-1]))
    survey.add("b", stored(SYSTEM) + stored([4], SYSTEM[-1]))
    assert largest(survey) == [SharedPrefix(10, 3, ("a", "b"))]


def test_a_prompt_that_nothing_else_begins_with_is_none() -> None:
    survey = PrefixSurvey()
    survey.add("a", stored(SYSTEM) + stored([7, 8]))
    assert largest(survey) == []


def test_prefixes_are_ordered_by_the_blocks_that_sharing_saves() -> None:
    survey = PrefixSurvey()
    short = b"".join(stored([1000 + i], 1) for i in range(50))
    survey.add("a", stored([1]) + short)
    survey.add("b", stored(SYSTEM) + stored([2], SYSTEM[-1]) + stored([3], SYSTEM[-1]))
    assert largest(survey) == [SharedPrefix(1, 50, ("a",)), SharedPrefix(10, 2, ("b",))]
    assert largest(survey, most=1) == [SharedPrefix(1, 50, ("a",))]


def test_a_branch_within_a_branch_counts_for_both() -> None:
    survey = PrefixSurvey()
    survey.add("a", stored([1, 2, 3]) + stored([4], 3) + stored([5], 3) + stored([6], 2))
    assert largest(survey) == [SharedPrefix(3, 2, ("a",)), SharedPrefix(2, 3, ("a",))][::-1]


def test_work_is_done_in_slices() -> None:
    survey = PrefixSurvey()
    survey.add("a", stored(range(1, 10 * SLICE_BLOCKS)))
    found: list[SharedPrefix] = []
    assert sum(1 for _ in survey.largest(50, found)) >= 10
    assert survey.room == MOST_BLOCKS - survey.read_blocks


def test_names_that_are_before_themselves_end_the_walk() -> None:
    survey = PrefixSurvey()
    survey.add("a", stored([1, 2], 3) + stored([3], 2))
    assert largest(survey) == []
