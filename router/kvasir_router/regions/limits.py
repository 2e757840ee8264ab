"""Limits of a tenant that cells share: one of them, the tenant's home cell, has the bucket.

Another cell spends allotments: tokens that the home cell has taken from the bucket and given to it for a few
seconds. It asks for as much as it expects to need, once a second, and gives back what it does not. While its
home cell does not answer, it has the equal part of the limit that falls to each of the cells.

The bound. Let C be the limit per minute, n the number of cells, and F the part of C that may be out in
allotments at a time (`out_share`). The content of the bucket and of all allotments together is at most
(1 + F) C, and grows only by the refill of C / 60 per second: an allotment, what is spent of one and what is
returned of one add nothing to it. In any span of s seconds, the cells that reach the home cell therefore
admit at most C (1 + F + s / 60), and each one that does not at most C / n (1 + s / 60) more. `overshoot` is
what exceeds C (1 + s / 60). Messages that are lost, repeated or late only make it less: an allotment that its
cell never got, or gives back too late, is spent by nobody.

No clocks are compared: a cell counts the life of an allotment from when it asked, and the home cell from when
it gave, which is later.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

WINDOW_S = 60.0
"""Seconds in which an empty bucket is filled, as in kvasir.ports.limits."""
_SLACK = 1e-6
"""Tokens by which sums of floating-point numbers may differ."""
_MAX_OUT = 32
"""Allotments of one cell at a time."""
_MAX_ASKING = 1024
"""Cells, and routers of cells that have several, whose last ask is remembered."""


@dataclass(frozen=True, slots=True)
class SharedLimitRules:
    """`allotment_s` is the life of an allotment. `out_share` of a minute's amount may be out at a time: what
    one request needs beyond that is never admitted in another cell than the home cell. A cell that has had no
    answer for `apart_s` is apart from its home cell. A cell asks for `ahead_s` of its use in about
    `recent_s`, at least for `least_share` of a minute's amount."""

    allotment_s: float = 6.0
    out_share: float = 0.5
    apart_s: float = 2.5
    ahead_s: float = 3.0
    recent_s: float = 10.0
    least_share: float = 0.01

    def __post_init__(self) -> None:
        if (
            min(self.allotment_s, self.apart_s, self.ahead_s, self.recent_s) <= 0
            or not 0 < self.out_share <= 1
        ):
            raise ValueError("times are positive, and out_share is in (0, 1]")
        if not 0 < self.least_share <= self.out_share:
            raise ValueError("least_share is positive and at most out_share")


def overshoot(per_min: float, cells: int, apart: int, seconds: float, rules: SharedLimitRules) -> float:
    """Return by how much the cells together may exceed one bucket of `per_min` in a span of `seconds`, when
    `apart` of them do not reach the home cell in some part of it."""
    return per_min * (rules.out_share + apart / cells * (1 + seconds / WINDOW_S))


class AllotmentAsk(msgspec.Struct, frozen=True, array_like=True):
    """What a cell asks of the home cell of a limit. `number` grows with each of its asks. `returned` are
    tokens that it gives back, by the number of the allotment."""

    cell: str
    number: int
    wanted: float
    returned: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=_MAX_OUT)] = ()


class Allotment(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the ask with that number: `amount` tokens, 0 if there are none."""

    number: int
    amount: float


class Admitted(StrEnum):
    """What a cell makes of a request: it is admitted, it has to wait for an answer of the home cell that is
    under way or due, or it is beyond the limit."""

    YES = "yes"
    ASK = "ask"
    NO = "no"


class TokenBucket:
    """A bucket with a minute's amount and a constant refill. Starts full."""

    __slots__ = ("_content", "_per_min", "_since_s")

    def __init__(self, per_min: float, now: float) -> None:
        self._per_min, self._content, self._since_s = per_min, per_min, now

    def content(self, now: float) -> float:
        """Return what is in it; negative after a debt."""
        if now > self._since_s:
            refill = (now - self._since_s) * self._per_min / WINDOW_S
            self._content = min(self._per_min, self._content + refill)
            self._since_s = now
        return self._content

    def take(self, amount: float, now: float) -> bool:
        """Take the whole amount, or nothing and return False."""
        if self.content(now) + _SLACK < amount:
            return False
        self._content -= amount
        return True

    def add(self, amount: float, now: float) -> None:
        """Put an amount back, or owe it if negative: at most a minute's amount is owed."""
        self._content = max(-self._per_min, min(self._per_min, self.content(now) + amount))


class HomeLimit:
    """A limit at its home cell: the bucket, and what is out by cell. Requests of the home cell itself are
    taken from the bucket."""

    def __init__(self, per_min: float, now: float, rules: SharedLimitRules | None = None) -> None:
        self.rules = rules or SharedLimitRules()
        self._per_min = per_min
        self._bucket = TokenBucket(per_min, now)
        self._out: dict[str, deque[tuple[float, int, float]]] = {}
        self._asked: dict[str, int] = {}

    def take(self, amount: float, now: float) -> Admitted:
        """Admit a request of the home cell."""
        return Admitted.YES if self._bucket.take(amount, now) else Admitted.NO

    def give_back(self, amount: float, now: float) -> None:
        """Return what a request of the home cell did not use; negative is debt."""
        self._bucket.add(amount, now)

    def out(self, now: float) -> float:
        """Return the tokens that are out in allotments, spent or not."""
        for cell in list(self._out):
            given = self._out[cell]
            while given and given[0][0] <= now:
                given.popleft()
            if not given:
                del self._out[cell]
        return sum(amount for given in self._out.values() for _, _, amount in given)

    def allot(self, ask: AllotmentAsk, now: float) -> Allotment:
        """Answer a cell. An ask that comes again, or after a later one, gets nothing."""
        wanted, returned = self.asked(ask, now)
        self._bucket.add(returned, now)
        amount = max(0.0, min(wanted, self._bucket.content(now)))
        self._bucket.add(-amount, now)
        self.given(ask, amount, now)
        return Allotment(ask.number, amount)

    def asked(self, ask: AllotmentAsk, now: float) -> tuple[float, float]:
        """Return how much an ask may get of the bucket, and how much it returns to it."""
        if ask.number <= self._asked.get(ask.cell, 0):
            return 0.0, 0.0
        self._asked.pop(ask.cell, None)
        self._asked[ask.cell] = ask.number
        if len(self._asked) > _MAX_ASKING:
            del self._asked[next(iter(self._asked))]
        returned = sum(self._returned(ask.cell, number, amount, now) for number, amount in ask.returned)
        room = self.rules.out_share * self._per_min - self.out(now)
        full = len(self._out.get(ask.cell, ())) >= _MAX_OUT
        return 0.0 if full else max(0.0, min(ask.wanted, room)), returned

    def given(self, ask: AllotmentAsk, amount: float, now: float) -> None:
        """Remember what an ask got."""
        if amount > 0:
            given = self._out.setdefault(ask.cell, deque())
            given.append((now + self.rules.allotment_s, ask.number, amount))

    def _returned(self, cell: str, number: int, amount: float, now: float) -> float:
        """Return how much comes back of an allotment that has not ended."""
        self.out(now)
        given = self._out.get(cell, deque())
        for place, (ends_s, known, left) in enumerate(given):
            if known == number and amount > 0:
                back = min(amount, left)
                given[place] = ends_s, known, left - back
                return back
        return 0.0


@dataclass(slots=True)
class _Held:
    """What a cell has of an allotment: `left` of `amount` tokens."""

    number: int
    ends_s: float
    amount: float
    left: float


def _ends_s(held: _Held) -> float:
    return held.ends_s


class AllottedLimit:
    """A limit in a cell that is not its home cell. `cells` is the number of all cells. Asks are numbered from
    `after` on, which is larger than all numbers before a restart, such as the time of the start."""

    def __init__(
        self,
        cell: str,
        per_min: float,
        cells: int,
        now: float,
        rules: SharedLimitRules | None = None,
        *,
        after: int = 0,
    ) -> None:
        self.rules = rules or SharedLimitRules()
        self._cell, self._per_min = cell, per_min
        self._held: list[_Held] = []
        self._own = TokenBucket(per_min / max(1, cells), now)
        self._number = after
        self._asked: dict[int, float] = {}
        self._unanswered_s: float | None = None
        self._used = self._missed = self._rate = self._debt = 0.0
        self._since_s = now

    def apart(self, now: float) -> bool:
        """Whether the home cell does not answer what it is asked."""
        return self._unanswered_s is not None and now - self._unanswered_s > self.rules.apart_s

    def held(self, now: float) -> float:
        """Return what is left of the allotments."""
        while self._held and self._held[0].ends_s <= now:
            del self._held[0]
        return sum(each.left for each in self._held)

    def take(self, amount: float, now: float) -> Admitted:
        """Admit a request for `amount` tokens. On ASK the caller asks, and tries again with the answer; an
        answer that does not suffice means NO."""
        if self.held(now) + _SLACK >= amount:
            self._spend(amount)
            self._used += amount
            return Admitted.YES
        if self.apart(now):
            return Admitted.YES if self._own.take(amount, now) else Admitted.NO
        if amount > self.rules.out_share * self._per_min:
            # Asking would take from the home cell what is of no use here.
            return Admitted.NO
        self._missed += amount
        return Admitted.ASK

    def give_back(self, amount: float, now: float) -> None:
        """Return what a request did not use; negative is debt, which the next allotments pay."""
        held = self.held(now)
        self._used = max(0.0, self._used - amount)
        if amount < 0:
            paid = min(-amount, held)
            self._spend(paid)
            self._debt = min(self._per_min, self._debt - amount - paid)
            return
        # Not beyond what was given: the rest ended with its allotment.
        for each in reversed(self._held):
            part = min(amount, each.amount - each.left)
            each.left += part
            amount -= part

    def _spend(self, amount: float) -> None:
        for each in self._held:
            part = min(each.left, amount)
            each.left -= part
            amount -= part

    def ask(self, now: float) -> AllotmentAsk:
        """Return what to ask the home cell for: what the recent use needs beyond what is held for longer.
        What is held beyond twice the need is returned, and what is about to end, when other tokens have come
        in its place."""
        rules, passed_s = self.rules, max(now - self._since_s, 1e-3)
        weight = min(1.0, passed_s / rules.recent_s)
        self._rate += weight * ((self._used + self._missed) / passed_s - self._rate)
        need = max(self._rate * rules.ahead_s, self._missed, rules.least_share * self._per_min)
        self._used = self._missed = 0.0
        self._since_s = now
        held = self.held(now)
        ending = sum(each.left for each in self._held if each.ends_s - now < rules.allotment_s / 2)
        returned = self._surplus(held - 2 * need, now)
        self._number += 1
        self._remember(now)
        return AllotmentAsk(self._cell, self._number, max(0.0, need + self._debt - (held - ending)), returned)

    def _remember(self, now: float) -> None:
        """Expect an answer to the last ask. Of too many, the oldest are not expected any more."""
        life_s = self.rules.allotment_s
        recent = [(number, at) for number, at in self._asked.items() if now - at < life_s]
        self._asked = dict(recent[-(_MAX_OUT - 1) :])
        self._asked[self._number] = now
        if self._unanswered_s is None:
            self._unanswered_s = now

    def _surplus(self, surplus: float, now: float) -> tuple[tuple[int, float], ...]:
        """Take a surplus out of the oldest allotments, and all of those that are about to end."""
        found = []
        for each in self._held:
            last = each.ends_s - now < self.rules.allotment_s / 4
            part = each.left if last else min(each.left, surplus)
            if part > 0:
                each.left -= part
                each.amount -= part
                surplus -= part
                found.append((each.number, part))
        return tuple(found)

    def answered(self, answer: Allotment, now: float) -> None:
        """Take the answer to an ask. One that comes again, or after the life of its allotment, is ignored."""
        asked_s = self._asked.pop(answer.number, None)
        if asked_s is None:
            return
        self._unanswered_s = None
        ends_s = asked_s + self.rules.allotment_s
        if answer.amount > 0 and ends_s > now:
            paid = min(self._debt, answer.amount)
            self._debt -= paid
            left = answer.amount - paid
            insort(self._held, _Held(answer.number, ends_s, left, left), key=_ends_s)
