"""The schedule of the slow tests names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.suite.schedule import LONGEST, SHARED, group_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("group", LONGEST)
def test_a_group_of_the_schedule_has_tests(group: str) -> None:
    if group in SHARED.values():
        return
    file, _, test = group.partition("::")
    assert group_of(group) == group
    assert f"def {test}(" in (ROOT / file).read_text() or not test


@pytest.mark.parametrize("file", SHARED)
def test_a_file_that_shares_an_engine_exists(file: str) -> None:
    assert (ROOT / file).exists()
