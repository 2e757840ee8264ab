"""The concurrency of a tenant in all cells: its home cell gives slots, each for one request at a time.

Another cell asks once a second for as many slots as its requests need, and at once when one waits; with the
ask it gives up what it does not ask for. While its home cell does not answer, it admits requests as long as
fewer than the equal part of the limit that falls to each of the cells run there.

The bound. Let C be the limit and n the number of cells. What the home cell counts for another one is never
less than what that one may run: it is raised before the answer is sent, and lowered by an ask that the other
cell obeys already. So cells that reach the home cell run at most C requests together. A cell that does not
runs the requests that it had, at most as many as it had slots, and begins one only while fewer than
⌈C / n⌉ run there; the home cell counts its slots for `allotment_s` more. `slots_overshoot` is what all that
may add. It ends with the requests that ran as the cell came back.

Messages that are lost, repeated or late only make it less. No clocks are compared: a cell counts the life of
its slots from when it asked, and the home cell from when it gave them, which is later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvasir_router.regions.limits import Admitted, SharedLimitRules

_MAX_SLOTS = 1_000_000
_MAX_GIVEN = 1024
"""Cells, and routers of cells that have several, that are given slots."""
_MAX_ASKED = 32
"""Asks that an answer is expected to."""
KEPT_S = 1.0
"""How long a cell keeps a slot that no request uses, and how long it refuses after the home cell had no more
for it."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_SLOTS)]


class SlotAsk(msgspec.Struct, frozen=True, array_like=True):
    """What a cell asks of the home cell: `wanted` slots in all, while `running` requests run. `number` grows
    with each of its asks."""

    cell: str
    number: int
    wanted: _Count
    running: _Count


class SlotGrant(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the ask with that number: how many slots the cell has in all."""

    number: int
    slots: _Count


def part_of(most: int, cells: int) -> int:
    """Return how many requests may run in a cell that does not reach the home cell: at least one."""
    return -(-most // max(1, cells))


def slots_overshoot(most: int, cells: int, apart: int) -> int:
    """Return by how much the requests that run in all cells may exceed `most`, when `apart` of them have not
    reached the home cell for some time since one of these began."""
    return most + (apart - 1) * part_of(most, cells) if apart else 0


@dataclass(slots=True)
class _Given:
    """What the home cell knows of another one: the number of its last ask, the slots it has, and what is
    counted for it, which is more if more of its requests run."""

    number: int
    slots: int = 0
    counted: int = 0
    ends_s: float = 0.0


class HomeSlots:
    """The slots of a tenant at its home cell, of which its own requests take theirs directly."""

    def __init__(self, most: int, rules: SharedLimitRules | None = None) -> None:
        self.rules = rules or SharedLimitRules()
        self._most = most
        self._running = 0
        self._given: dict[str, _Given] = {}

    def take(self, now: float) -> Admitted:
        """Admit a request of the home cell."""
        if self._running + self.given(now) >= self._most:
            return Admitted.NO
        self._running += 1
        return Admitted.YES

    def end(self) -> None:
        """A request of the home cell has ended."""
        self._running -= 1

    def given(self, now: float) -> int:
        """Return the slots that count as used by other cells."""
        for each in self._given.values():
            if each.ends_s <= now:
                each.slots = each.counted = 0
        return sum(each.counted for each in self._given.values())

    def grant(self, ask: SlotAsk, now: float) -> SlotGrant | None:
        """Answer a cell. An ask that comes again, or after a later one, gets no answer."""
        known = self._asking(ask, now)
        if known is None:
            return None
        room = self._most - self._running - (self.given(now) - known.counted)
        # What it has is taken from it only as it asks for less.
        slots = min(ask.wanted, max(room, known.slots, 0))
        known.slots, known.counted = slots, max(slots, ask.running)
        return SlotGrant(ask.number, slots)

    def asked(self, ask: SlotAsk, now: float) -> bool:
        """Return whether an ask is to be answered, by slots that are counted elsewhere."""
        return self._asking(ask, now) is not None

    def _asking(self, ask: SlotAsk, now: float) -> _Given | None:
        """Return what is known of who asks; None for an ask that comes again or late."""
        known = self._given.get(ask.cell)
        if known is None:
            if len(self._given) >= _MAX_GIVEN and not self._forget(now):
                return None
            known = self._given[ask.cell] = _Given(ask.number - 1)
        if ask.number <= known.number:
            return None
        if known.ends_s <= now:
            known.slots = known.counted = 0
        known.number, known.ends_s = ask.number, now + self.rules.allotment_s
        return known

    def _forget(self, now: float) -> bool:
        """Forget those that have nothing any more. Return whether there were any."""
        before = len(self._given)
        self._given = {cell: each for cell, each in self._given.items() if each.ends_s > now}
        return len(self._given) < before


class CellSlots:
    """The slots of a tenant in a cell that is not its home cell. `cells` is the number of all cells. Asks are
    numbered from `after` on, which is larger than all numbers before a restart."""

    def __init__(
        self, cell: str, most: int, cells: int, rules: SharedLimitRules | None = None, *, after: int = 0
    ) -> None:
        self.rules = rules or SharedLimitRules()
        self.running = 0
        self._cell, self._most, self._part = cell, most, part_of(most, cells)
        self._number = after
        self._asked: dict[int, tuple[float, int]] = {}
        self._unanswered_s: float | None = None
        self._slots, self._ends_s = 0, float("-inf")
        self._peak, self._peak_s = 0, float("-inf")
        self._short_s = float("-inf")

    def apart(self, now: float) -> bool:
        """Whether the home cell does not answer what it is asked."""
        return self._unanswered_s is not None and now - self._unanswered_s > self.rules.apart_s

    def held(self, now: float) -> int:
        """Return the slots that the home cell has given."""
        return self._slots if now < self._ends_s else 0

    def take(self, now: float) -> Admitted:
        """Admit a request. On ASK the caller asks, and tries again with the answer."""
        apart, held = self.apart(now), self.held(now)
        if self.running < max(held, self._part if apart else 0):
            self.running += 1
            self._peak = max(self._peak, self.running)
            return Admitted.YES
        none_left = held >= self._most or now - self._short_s < KEPT_S
        return Admitted.NO if apart or none_left else Admitted.ASK

    def end(self) -> None:
        """A request has ended."""
        self.running -= 1

    def ask(self, waiting: int, now: float) -> SlotAsk:
        """Return what to ask the home cell for, while `waiting` requests wait: slots for these and for those
        that run, and at least as many as were in use lately."""
        wanted = min(self._most, max(self._peak, self.running + waiting))
        if now - self._peak_s >= KEPT_S:
            self._peak, self._peak_s = self.running, now
        self._slots = min(self._slots, wanted)
        self._number += 1
        recent = [each for each in self._asked.items() if now - each[1][0] < self.rules.allotment_s]
        self._asked = dict(recent[-(_MAX_ASKED - 1) :])
        self._asked[self._number] = now, wanted
        if self._unanswered_s is None:
            self._unanswered_s = now
        return SlotAsk(self._cell, self._number, wanted, min(self.running, _MAX_SLOTS))

    def answered(self, grant: SlotGrant, now: float) -> None:
        """Take the answer to an ask. One that comes again, or after a later one, is ignored."""
        if grant.number not in self._asked:
            return
        asked_s, wanted = self._asked[grant.number]
        self._asked = {number: asked for number, asked in self._asked.items() if number > grant.number}
        self._unanswered_s = None
        # Asks that the home cell may have read since have given slots up.
        self._slots = min([grant.slots, *(later for _, later in self._asked.values())])
        self._ends_s = asked_s + self.rules.allotment_s
        self._short_s = now if grant.slots < wanted else float("-inf")
