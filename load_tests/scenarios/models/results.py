"""Cells of the table of models, and how they are judged. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from load_tests.scenarios.models.engines import LENGTHS, Generated

Verdict = Literal["yes", "partly", "no", "not moved"]

COLUMNS = ("plain vLLM", "aggregated", "disaggregated", "tiers", "LoRA", "kvasir up", "tools")
SAME_LOGPROB = 1e-4
"""Log-probabilities that differ by less are equal but for the order of additions."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether a model works in one way, and why not."""

    verdict: Verdict
    note: str = ""


def equal_tokens(reference: Generated, made: Generated, what: str = "tokens") -> Cell:
    """Compare the tokens of a run with those of vLLM alone."""
    theirs = reference.adapted if what == "adapted" else reference.tokens
    ours: list[list[int]] = getattr(made, what)
    return _compared(theirs, ours, reference, made if what == "tokens" else None)


def served_again(reference: Generated, made: Generated, cell: Cell, block: int) -> Cell:
    """Return `cell`, unless prompts that came a second time got other tokens or were not found in the cache,
    though they are longer than a block of `block` tokens."""
    if cell.verdict == "no":
        return cell
    again = _compared(reference.tokens, made.again, reference, None)
    if again.verdict != "yes" and cell.verdict == "yes":
        return Cell(again.verdict, f"when a prompt comes again: {again.note}")
    pairs = zip(LENGTHS, made.cached, strict=True)
    missed = [length for length, cached in pairs if not cached and length > block]
    if missed:
        return Cell("partly", _joined(cell.note, f"no prefix hit for prompts of {_list(missed)} tokens"))
    return cell


def moved(made: Generated, cell: Cell, where: str) -> Cell:
    """Return `cell`, unless KV did not come from `where`."""
    missed = [length for length, tokens in zip(LENGTHS, made.moved, strict=True) if not tokens]
    if cell.verdict == "no" or not missed:
        return cell
    return Cell(
        "partly", _joined(cell.note, f"nothing came from {where} for prompts of {_list(missed)} tokens")
    )


def together(cells: Sequence[Cell]) -> Cell:
    """Return the worst of some cells."""
    order: tuple[Verdict, ...] = ("no", "partly", "not moved", "yes")
    return min(cells, key=lambda cell: order.index(cell.verdict))


def _compared(
    theirs: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    reference: Generated,
    made: Generated | None,
) -> Cell:
    differing = [
        at for at, (one, other) in enumerate(zip(theirs, ours, strict=True)) if list(one) != list(other)
    ]
    if not differing:
        return Cell("yes")
    equal = len(theirs) - len(differing)
    note = f"{equal} of {len(theirs)} prompts have equal tokens"
    if made is None:
        return Cell("partly", note)
    gap = _worst_gap(reference, made, theirs, ours)
    return Cell("partly", f"{note}; up to the first difference log-probabilities agree within {gap:.2g}")


def _worst_gap(
    reference: Generated, made: Generated, theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]
) -> float:
    """Return the largest difference of log-probabilities while the tokens before them are equal."""
    worst = 0.0
    for at, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        for position, (a, b) in enumerate(zip(one, other, strict=False)):
            first, second = reference.logprobs[at][position], made.logprobs[at][position]
            worst = max([worst, *(abs(first[token] - second[token]) for token in first if token in second)])
            if a != b:
                break
    return worst


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _list(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))
