"""Which places may do which part of a request: the one filter that every policy begins with."""

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
    """Whether prefill and decode run apart: by rule, by cost, or not at all."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class Eligible(NamedTuple):
    """Rows of the candidates. Any of `full` may run the whole request; one of `prefill` and one of
    `decode` on another worker may share it."""

    full: IntColumn
    prefill: IntColumn
    decode: IntColumn


def apart_or_whole(candidates: Candidates, disaggregation: Disaggregation, whole: bool) -> Eligible:
    """Which places may do which part. `whole`: the request has to run on one worker."""
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
    """Those of `rows` that are on another worker than `row`."""
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
    """A plan by separate rules for separate parts: apart where that is possible and allowed, the place of
    the prefill being chosen first, else whole; None where neither is."""
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
    """The plan that names these rows. What lower tiers hold is no less of a hit."""
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
    """What has to join before an ordinary request can run, in words; None when nothing."""
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
    """The rows that may prefill and have a place on another worker to decode at."""
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
