"""Results that survive a process, and are read once however they were written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvasir.core.errors import CapacityError
from kvasir_platform.gateway.batches.storage.journal import Journal, LineResult
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


def test_segments_that_are_merged_while_they_are_read_are_not_missed(tmp_path: Path) -> None:
    class Merging(LocalStorage):
        """Another process merges the segments once they are listed."""

        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            if len(found) == 63:
                writer.append([result(63)])
            return found

    writer = Journal(LocalStorage(tmp_path), "j", 1)
    for number in range(63):
        writer.append([result(number)])
    read = [each.number for each in Journal(Merging(tmp_path), "j").results()]
    assert sorted(read) == list(range(64))


def test_a_journal_that_vanishes_all_the_time_is_an_error(tmp_path: Path) -> None:
    class Vanishing(LocalStorage):
        def get(self, key: str) -> None:
            return None

    Journal(LocalStorage(tmp_path), "j", 1).append([result(0)])
    with pytest.raises(CapacityError):
        list(Journal(Vanishing(tmp_path), "j").results())
