"""Values are small, immutable, hashable, and compare by content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mypy import api

from kvasir.core.requests import Delta, Usage
from kvasir.core.values import changed

TWO_WAYS_TO_CHANGE_ONE = """
from kvasir.core.requests import Delta
from kvasir.ports.router import RequestSummary

def change(delta: Delta, summary: RequestSummary) -> None:
    delta.text = "other"
    summary.outcome = "ok"
"""


def test_equal_fields_make_equal_values_with_equal_hashes() -> None:
    one, other = Delta("r", 0, (1,), "a"), Delta("r", 0, (1,), "a")
    assert one == other
    assert len({one, other, replace(one, text="b")}) == 2


def test_a_value_has_no_room_for_what_is_not_a_field() -> None:
    assert not hasattr(Usage(), "__dict__")


def test_a_changed_value_is_another_one_that_differs_in_these_fields_only() -> None:
    usage = Usage(prompt_tokens=5, cached_tokens=4, transferred_bytes=3, tier_tokens=2)
    delta = Delta("r", 7, (1, 2), "a", index=1, last=True, usage=usage, raw_length=9)
    made = changed(delta, text="b", usage=None)
    assert made == replace(delta, text="b", usage=None)
    assert (delta.text, delta.usage) == ("a", usage)
    assert changed(usage) == usage
    assert changed(usage) is not usage


def test_a_value_cannot_be_changed_in_what_is_not_a_field() -> None:
    with pytest.raises(AttributeError, match="colour"):
        changed(Usage(), colour=1)


@pytest.mark.slow
def test_the_type_checker_refuses_to_change_a_value(tmp_path: Path) -> None:
    changing = tmp_path / "changing.py"
    changing.write_text(TWO_WAYS_TO_CHANGE_ONE)
    said, _, _ = api.run(
        [str(changing), "--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent"]
    )
    assert said.count("read-only") == 2, said
