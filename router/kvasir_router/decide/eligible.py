"""Which places may run which part of a request: the filter that every policy starts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from kvasir.ports.routing import BoolColumn, Candidates, IntColumn, Plan

Choose = Callable[[IntColumn], int]
"""Picks one of some rows of the candidates; never called with none."""

NO_ROWS: IntColumn = np.empty(0, dtype=np.int64)


class Disaggregation(StrEnum):
    """Whether requests are disaggregated: always, by cost, or never."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class Eligible(NamedTuple):
    """Rows of the candidates. Any of `full` may run the whole request; one of `prefill` and one of `decode`
    on another worker may share it."""

    full: IntColumn
    prefill: IntColumn
    decode: IntColumn


def apart_or_whole(candidates: Candidates, disaggregation: Disaggregation, whole: bool) -> Eligible:
    """Return the places by part. `whole`: the request has to run on one worker."""
    if disaggregation is Disaggregation.NEVER:
        return Eligible(_rows(candidates.prefills & candidates.decodes), NO_ROWS, NO_ROWS)
    decode = _rows(candidates.decodes)
    if whole:
        return Eligible(decode, NO_ROWS, NO_ROWS)
    prefill = _rows(candidates.prefills)
    if disaggregation is Disaggregation.ALWAYS:
        return Eligible(NO_ROWS, prefill, decode)
    return Eligible(decode, prefill, decode)


def other_rows(candidates: Candidates, rows: IntColumn, row: int) -> IntColumn:
    """Return those of `rows` that are on another worker than `row`."""
    worker = candidates.worker
    others: IntColumn = rows[worker[rows] != worker[row]]
    return others


def plan_by_parts(
    candidates: Candidates,
    disaggregation: Disaggregation,
    whole: bool,
    *,
    prefill: Choose,
    decode: Choose,
    full: Choose,
    reason: str,
) -> Plan | None:
    """Plan with a separate rule for each part: disaggregated if possible and allowed, with the prefill place
    chosen first, else whole; None if neither is possible."""
    may = apart_or_whole(candidates, disaggregation, whole)
    prefills = with_a_partner(candidates, may)
    if len(prefills):
        first = prefill(prefills)
        second = decode(other_rows(candidates, may.decode, first))
        return plan_of(candidates, first, second, reason)
    if len(may.full):
        return plan_of(candidates, None, full(may.full), reason)
    return None


def plan_of(candidates: Candidates, prefill: int | None, decode: int, reason: str) -> Plan:
    """Return the plan of these rows. Blocks in lower tiers count as hits."""
    row = decode if prefill is None else prefill
    below = tuple(candidates.tier_tokens[row].tolist())
    return Plan(
        prefill=None if prefill is None else candidates.targets[prefill],
        decode=candidates.targets[decode],
        reason=reason,
        predicted_cached_tokens=candidates.cached_tokens.item(row) + sum(below),
        predicted_tier_tokens=below,
    )


def missing_role(
    prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int], disaggregation: Disaggregation
) -> str | None:
    """Return what has to join before an ordinary request can run, in words; None if nothing."""
    if disaggregation is Disaggregation.NEVER:
        both = any(p and d for p, d in zip(prefills, decodes, strict=True))
        return None if both else "no worker of role both"
    decoding = {w for w, d in zip(worker, decodes, strict=True) if d}
    if not decoding:
        return "no worker that decodes"
    if disaggregation is Disaggregation.AUTO:
        return None
    prefilling = {w for w, p in zip(worker, prefills, strict=True) if p}
    if not prefilling:
        return "no worker that prefills"
    if len(prefilling | decoding) == 1:
        return "no second worker: prefill and decode are to run apart"
    return None


def with_a_partner(candidates: Candidates, may: Eligible) -> IntColumn:
    """Return the rows that may prefill and have a decode place on another worker."""
    if not len(may.prefill) or not len(may.decode):
        return NO_ROWS
    decoding = candidates.worker[may.decode]
    if (decoding != decoding[0]).any():
        return may.prefill
    partnered: IntColumn = may.prefill[candidates.worker[may.prefill] != decoding[0]]
    return partnered


def _rows(mask: BoolColumn) -> IntColumn:
    rows: IntColumn = mask.nonzero()[0]
    return rows
