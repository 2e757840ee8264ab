"""Base of the policies of other systems: a request is placed whole, or disaggregated on two workers.

Each system publishes a rule that finds one place. That rule chooses where the prompt is computed, in separate
pools and in a fleet of whole workers alike. For the decode part a policy may have a rule of its own; the
default is the fewest streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, FloatColumn, IntColumn, Plan, RequestView, TermTable
from kvasir_router.decide.eligible import Choose, Disaggregation, missing_role, plan_by_parts

PREFILL, DECODE, WHOLE = "prefill", "decode", "whole"


class PlacementQuery(NamedTuple):
    """Which of `rows` (never empty) runs `part` of the request."""

    request: RequestView
    candidates: Candidates
    rows: IntColumn
    part: str

    def table(self, unit: str, names: tuple[str, ...], *columns: FloatColumn | IntColumn) -> TermTable:
        """Return the terms of all rows, a column for each name."""
        values = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
        return TermTable(self.part, unit, self.rows, names, values)

    def in_flight(self) -> IntColumn:
        """Requests at each row that have not ended."""
        return self.candidates.waiting[self.rows] + self.candidates.streams[self.rows]


class PlacementChoice(NamedTuple):
    """The chosen row, the terms of the choice, a stable reason if the policy's name is not enough, and the
    seconds until the first token, 0 if the policy does not predict them."""

    row: int
    table: TermTable
    reason: str = ""
    ttft_s: float = 0.0


def least(rows: IntColumn, values: FloatColumn | IntColumn, rng: Rng) -> int:
    """Return a row with the smallest value; ties at random."""
    ties = rows[values == values.min()]
    return int(ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))])


class PeerPolicy(ABC):
    """A policy that places one part at a time. See RoutingPolicy."""

    name: str

    def __init__(self, disaggregation: Disaggregation, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._rng = rng

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        """Disaggregated if allowed and possible, else whole."""
        placed: list[PlacementChoice] = []

        def by(rule: Callable[[PlacementQuery], PlacementChoice], part: str) -> Choose:
            def choose(rows: IntColumn) -> int:
                placed.append(rule(PlacementQuery(request, candidates, rows, part)))
                return placed[-1].row

            return choose

        plan = plan_by_parts(
            candidates,
            self._disaggregation,
            request.whole,
            prefill=by(self._place, PREFILL),
            decode=by(self._decode, DECODE),
            full=by(self._place, WHOLE),
            reason=self.name,
        )
        if plan is None:
            return None
        words = [part.reason for part in placed if part.reason]
        return replace(
            plan,
            reason=words[-1] if words else self.name,
            predicted_ttft_s=placed[0].ttft_s,
            tables=tuple(part.table for part in placed),
        )

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(prefills, decodes, worker, self._disaggregation)

    @abstractmethod
    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        """Choose where the prompt is computed: for the prefill part, or for the whole request."""

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        streams = ask.candidates.streams[ask.rows]
        row = least(ask.rows, streams, self._rng)
        return PlacementChoice(row, ask.table("streams", ("streams",), streams))
