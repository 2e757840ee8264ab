"""How the bench of models judges what engines generated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from load_tests.scenarios.models.engines import LENGTHS, Generated
from load_tests.scenarios.models.results import Cell, Verdict, equal_tokens, moved, served_again, together

PROMPTS = len(LENGTHS)
PLAIN = Generated(
    tokens=[[1, 2]] * PROMPTS,
    logprobs=[[{1: -0.5}, {2: -0.25}]] * PROMPTS,
    again=[[1, 2]] * PROMPTS,
    cached=[32] * PROMPTS,
    moved=[32] * PROMPTS,
)


def test_equal_tokens_are_a_yes() -> None:
    assert equal_tokens(PLAIN, PLAIN) == Cell("yes")


def test_other_tokens_come_with_how_many_and_how_far_they_are_apart() -> None:
    other = replace(
        PLAIN,
        tokens=[[1, 3], *PLAIN.tokens[1:]],
        logprobs=[[{1: -0.5}, {2: -0.5, 3: -0.375}], *PLAIN.logprobs[1:]],
    )
    cell = equal_tokens(PLAIN, other)
    assert cell.verdict == "partly"
    assert cell.note.startswith(f"{PROMPTS - 1} of {PROMPTS} prompts have equal tokens")
    assert cell.note.endswith("within 0.25")


def test_a_prompt_that_is_not_found_again_is_named() -> None:
    missed = replace(PLAIN, cached=[0, *PLAIN.cached[1:]])
    assert served_again(PLAIN, missed, Cell("yes"), 32) == Cell(
        "partly", f"no prefix hit for prompts of {LENGTHS[0]} tokens"
    )


def test_a_prompt_without_a_whole_block_is_not_expected_in_a_cache() -> None:
    missed = replace(PLAIN, cached=[0, 0, *PLAIN.cached[2:]])
    assert served_again(PLAIN, missed, Cell("yes"), LENGTHS[1]) == Cell("yes")
    assert served_again(PLAIN, missed, Cell("yes"), LENGTHS[0]).verdict == "partly"


def test_a_prompt_that_did_not_move_is_named() -> None:
    still = replace(PLAIN, moved=[*PLAIN.moved[:-1], 0])
    assert str(LENGTHS[-1]) in moved(still, Cell("yes"), "the tier").note


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [(("yes", "yes"), "yes"), (("yes", "partly"), "partly"), (("partly", "no", "yes"), "no")],
)
def test_the_worst_of_several_counts(verdicts: tuple[Verdict, ...], worst: Verdict) -> None:
    assert together([Cell(verdict) for verdict in verdicts]).verdict == worst
