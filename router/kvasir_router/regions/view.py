"""What one cell knows of the others, and for how long that is good enough to decide by.

    fresh ──no report for stale_s──▶ stale ──no report for lost_s──▶ lost ──a report──▶ returning

    stale ──a report──▶ fresh       returning ──returns_after reports in a row──▶ fresh

A cell whose requests fail is lost as well, although its reports arrive: a partition can cut one direction, or
one port. Each loss soon after a return doubles the number of reports that the cell has to send before it is
used again, so that a link that comes and goes does not move requests back and forth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_router.regions.reports import MAX_MODELS, CellReport, ModelReport

MAX_CELLS = 64
_DOUBLINGS = 4


class CellState(StrEnum):
    """How well a cell is known. Requests go to a stale one only if no fresh one has capacity, and to one that
    is lost or returning never."""

    FRESH = "fresh"
    STALE = "stale"
    RETURNING = "returning"
    LOST = "lost"

    @property
    def usable(self) -> bool:
        """Whether requests may go there."""
        return self in (CellState.FRESH, CellState.STALE)


@dataclass(frozen=True, slots=True)
class ViewRules:
    """Seconds without a report until a cell is stale, and until it is lost; the reports in a row after which
    a lost one is used again; `failures` requests in a row that fail there and make it lost. A return that
    lasts `calm_s` makes earlier losses forgotten."""

    stale_s: float = 1.75
    lost_s: float = 2.5
    returns_after: int = 3
    failures: int = 2
    calm_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.stale_s <= self.lost_s:
            raise ValueError(f"stale_s {self.stale_s:g} must be positive and at most lost_s {self.lost_s:g}")
        if self.returns_after < 1 or self.failures < 1:
            raise ValueError("returns_after and failures are at least 1")


@dataclass(slots=True)
class _Known:
    """One cell. `sent` are the prompt tokens that this cell sent there by model and revision, in the present
    interval of reports and in the one before."""

    report: CellReport | None = None
    heard_s: float = 0.0
    lost: bool = True
    in_row: int = 0
    needed: int = 1
    losses: int = 0
    used_s: float = 0.0
    failed: int = 0
    reason: str = "no report yet"
    sent: list[dict[tuple[str, str], int]] = field(default_factory=lambda: [{}, {}])


class RegionView:
    """The other cells by name. Holds one report for each, and no more than MAX_CELLS of them; what is not in
    `cells` is not listened to. Times are monotonic seconds of the caller."""

    def __init__(self, cells: Iterable[str], rules: ViewRules | None = None) -> None:
        self.rules = rules or ViewRules()
        self._cells = {name: _Known() for name in cells}
        if len(self._cells) > MAX_CELLS:
            raise ValueError(f"{len(self._cells)} cells exceed the limit of {MAX_CELLS}")

    @property
    def cells(self) -> tuple[str, ...]:
        """The names of the cells, in the order in which they were given."""
        return tuple(self._cells)

    def heard(self, report: CellReport, now: float) -> bool:
        """Take a report. Return whether it is of a known cell and newer than the one before."""
        known = self._cells.get(report.cell)
        if known is None or (known.report is not None and report.order <= known.report.order):
            return False
        self._settle(known, now)
        gap_s = now - known.heard_s
        known.report, known.heard_s = report, now
        known.sent = [{}, known.sent[0]]
        if known.lost:
            known.in_row = known.in_row + 1 if known.in_row and gap_s <= self.rules.stale_s else 1
            if known.in_row >= known.needed:
                known.lost, known.failed, known.used_s, known.reason = False, 0, now, ""
        elif known.losses and now - known.used_s >= self.rules.calm_s:
            known.losses = 0
        return True

    def failed(self, cell: str, now: float) -> None:
        """A request that was sent there got no answer: the cell could not be reached."""
        known = self._cells.get(cell)
        if known is None or known.lost:
            return
        known.failed += 1
        if known.failed >= self.rules.failures:
            self._lose(known, now, f"{known.failed} requests in a row could not be delivered")

    def answered(self, cell: str) -> None:
        """A request that was sent there got an answer, of whatever kind."""
        known = self._cells.get(cell)
        if known is not None and not known.lost:
            known.failed = 0

    def sent(self, cell: str, model: str, revision: str, tokens: int) -> None:
        """A request with that many prompt tokens goes there: until the cell's reports include it, it counts
        as part of its queue. Without that, all that comes within a second would go to the same cell."""
        known = self._cells.get(cell)
        if known is None:
            return
        key, present = (model, revision), known.sent[0]
        if key in present or len(present) < MAX_MODELS:
            present[key] = present.get(key, 0) + tokens

    def state(self, cell: str, now: float) -> CellState:
        """Return how well the cell is known. Raises KeyError for an unknown one."""
        known = self._cells[cell]
        self._settle(known, now)
        if known.lost:
            return CellState.RETURNING if known.in_row else CellState.LOST
        return CellState.STALE if now - known.heard_s > self.rules.stale_s else CellState.FRESH

    def reason(self, cell: str, now: float) -> str:
        """Return why a cell is lost or returning, "" if it is not."""
        known = self._cells[cell]
        self._settle(known, now)
        if known.lost and known.in_row:
            return f"{known.in_row} of {known.needed} reports since it was lost: {known.reason}"
        return known.reason

    def report(self, cell: str) -> CellReport | None:
        """Return the cell's last report, None before the first."""
        return self._cells[cell].report

    def age_s(self, cell: str, now: float) -> float:
        """Return the seconds since the last report was heard."""
        return max(0.0, now - self._cells[cell].heard_s)

    def pending_tokens(self, cell: str, report: ModelReport) -> int:
        """Return the prompt tokens that were sent there and are not in its reports yet."""
        key = report.model, report.revision
        return sum(part.get(key, 0) for part in self._cells[cell].sent)

    def _settle(self, known: _Known, now: float) -> None:
        """Let time pass."""
        quiet_s = now - known.heard_s
        if quiet_s > self.rules.lost_s:
            if known.lost:
                known.in_row = 0
            elif known.report is not None:
                self._lose(known, now, f"no report for {self.rules.lost_s:g} s")

    def _lose(self, known: _Known, now: float, reason: str) -> None:
        calm = now - known.used_s >= self.rules.calm_s
        known.losses = 1 if calm else min(known.losses + 1, _DOUBLINGS + 1)
        known.needed = self.rules.returns_after << (known.losses - 1)
        known.lost, known.in_row, known.reason = True, 0, reason
        known.sent = [{}, {}]
