"""Results that survive a process, and are read once however they were written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvasir.core.errors import CapacityError
from kvasir_platform.gateway.batches.journal import Journal, LineResult
from kvasir_platform.gateway.batches.storage.local_storage import LocalStorage


def result(number: int, text: str = "{}") -> LineResult:
    return LineResult(number, True, (1, 0, 1, 0), msgspec.Raw(text.encode()))


def test_a_later_process_reads_what_was_appended(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    Journal(storage, "j", 1).append([result(0), result(1)])
    Journal(storage, "j", 2).append([result(2)])
    assert [each.number for each in Journal(storage, "j").results()] == [0, 1, 2]


def test_the_first_of_two_results_is_the_lines(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    Journal(storage, "j", 2).append([result(0, '"later"')])
    Journal(storage, "j", 1).append([result(0, '"first"')])
    assert [bytes(each.shown) for each in Journal(storage, "j").results()] == [b'"first"']


def test_segments_are_merged_and_lose_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    journal = Journal(storage, "j", 1)
    for number in range(200):
        journal.append([result(number)])
    assert len(storage.names("j")) < 64
    assert sorted(each.number for each in journal.results()) == list(range(200))


def test_a_crash_between_the_steps_of_a_merge_repeats_no_line(tmp_path: Path) -> None:
    class Crashing(LocalStorage):
        def remove(self, key: str) -> None:
            raise CapacityError("crashed", code="storage_unavailable")

    journal = Journal(Crashing(tmp_path), "j", 1)
    for number in range(63):
        journal.append([result(number)])
    with pytest.raises(CapacityError):
        journal.append([result(63)])
    assert [each.number for each in journal.results()] == list(range(64))
