"""Whether a fleet has a place for one more request: the capacity of its pools against what is reserved.

Three resources are limited. KV, in tokens: a request reserves its uncached prompt and its expected output.
Seats: the sequences that an engine runs at once, and those with which it still keeps the promised time per
token. Queued prompts: a worker gets another prompt only when it has little left to do, so that the router
keeps control of the order. Where a request goes is the policy's choice, which may be to wait for a cached
prefix. A place where nothing runs takes any request.

A prompt takes the time of its tokens, and the fixed time of each engine step after the first. The fixed time
of a step does not hold back prompts that still fit into it: engines compute many short prompts in one step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir.core.requests import Role
from kvasir.ports.routing import BoolColumn, IntColumn, Plan, RoutingTarget
from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.decide.rates import CHUNK_TOKENS
from kvasir_router.fleet.columns import (
    HEAD_SINCE,
    HEAD_TOKENS,
    QUEUED,
    RESERVED,
    STREAMS,
    TOKENS_PER_S,
    Columns,
)
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.fleet.work import Worker, WorkerState

_PREFILL_FIXED, _STEP_FIXED, _STEP_STREAM = 0, 2, 3
"""Rows of the rates (RateColumns)."""
_NO_LIMIT = 1 << 60
_GRAIN_S = 1e-3
"""Margin added to predicted times, so that rounding does not cause repeated checks."""
SPARE = 2
"""Which limits hold for requests that run in spare capacity; 0 and 1 are within and above a tenant's
share."""
_ENOUGH_PLACES = 4
"""With fewer places, none is kept for other tenants: one would be too large a part of them."""


@dataclass(slots=True)
class _Rows:
    """A set of places by row; `hint` is the one that was last found open."""

    rows: IntColumn
    listed: list[int] = field(init=False)
    hint: int = 0

    def __post_init__(self) -> None:
        self.listed = self.rows.tolist()


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits by row: KV tokens and sequences, each for everybody, for tenants above their share, and for
    requests that run in spare capacity only."""

    kv: tuple[IntColumn, IntColumn, IntColumn]
    seats: tuple[IntColumn, IntColumn, IntColumn]


@dataclass(frozen=True, slots=True)
class Booking:
    """KV reserved at a place for a long prompt that waits for it."""

    target: RoutingTarget
    tokens: int


class Room:
    """The places of a fleet that may be used; call `renew` after the fleet changes."""

    def __init__(
        self, columns: Columns, workers: Mapping[str, Worker], rules: AdmissionRules, gap: RoleGap
    ) -> None:
        self._columns = columns
        self._gap = gap
        self._workers = workers
        self._rules = rules
        self._prefill = self._decode = self._whole = _Rows(np.empty(0, dtype=np.int64))
        nothing = np.empty(0, dtype=np.int64)
        self._limits = _Limits((nothing, nothing, nothing), (nothing, nothing, nothing))
        self._step_tokens = nothing
        self.booking: Booking | None = None
        self.kv_tokens = 0
        """KV capacity of all decoding places."""

    def renew(self, avoided: frozenset[str]) -> None:
        """Recompute the places. `avoided` workers are left out, unless no others serve."""
        columns, rules = self._columns, self._rules
        ready = [self._workers[t.worker_id].state is WorkerState.READY for t in columns.targets]
        roles = [self._workers[t.worker_id].role for t in columns.targets]
        well = [
            up and target.worker_id not in avoided for up, target in zip(ready, columns.targets, strict=True)
        ]
        computes = [role is not Role.DECODE for role in roles]
        decodes = [role is not Role.PREFILL for role in roles]
        self._decode = _usable(decodes, well, ready)
        if self._gap.open:
            able = [self._workers[t.worker_id].any_role for t in columns.targets]
            self._decode = self._prefill = self._whole = _usable(able, well, ready)
        elif rules.disaggregation == "never":
            both = [one and other for one, other in zip(computes, decodes, strict=True)]
            self._decode = self._prefill = self._whole = _usable(both, well, ready)
        else:
            self._whole = _Rows(self._decode.rows)
            anywhere = rules.disaggregation == "auto"
            self._prefill = _usable([anywhere or one for one in computes], well, ready)
        self._limits = self._limited()
        pools = [self._workers[target.worker_id].identity.pool for target in columns.targets]
        self._step_tokens = np.array([rules.step_tokens.get(pool, CHUNK_TOKENS) for pool in pools], np.int64)
        self.kv_tokens = int(self._limits.kv[False][self._decode.rows].sum())

    @property
    def places(self) -> tuple[int, int]:
        """The number of places that compute prompts, and of those that decode."""
        return len(self._prefill.listed), len(self._decode.listed)

    def computes(self, ticket: AdmissionTicket, ahead_s: float, now: float, *, over: int) -> bool:
        """Whether some place has less than `ahead_s` of work left, or none serves. `over`: for a tenant above
        its share (1), or in spare capacity (2), for which some of these places are not available if there are
        enough."""
        places = self._whole if ticket.whole else self._prefill
        if ahead_s == math.inf or not places.listed:
            return True
        kept = self._kept(places, over=over)
        if kept:
            return int(np.count_nonzero(self._all_left_s(places.rows, now) < ahead_s)) > kept
        if self._left_s(places.listed[places.hint], now) < ahead_s:
            return True
        left = self._all_left_s(places.rows, now)
        places.hint = int(left.argmin())
        return bool(left[places.hint] < ahead_s)

    def opens_at(self, ticket: AdmissionTicket, ahead_s: float, now: float, *, over: int) -> float | None:
        """The time at which `computes` becomes true without a report from a worker; None if it needs one."""
        places = self._whole if ticket.whole else self._prefill
        rows = places.rows
        if not len(rows) or ahead_s == math.inf:
            return None
        ints, floats = self._columns.ints, self._columns.floats
        per_s = floats[TOKENS_PER_S, rows]
        to_do = ints[QUEUED, rows] - self._ahead_tokens(rows, ahead_s)
        when: NDArray[np.float64] = np.where(
            to_do < floats[HEAD_TOKENS, rows], floats[HEAD_SINCE, rows] + to_do / per_s, math.inf
        )
        soonest = float(np.sort(when)[self._kept(places, over=over)])
        return None if soonest == math.inf else max(now, soonest) + _GRAIN_S

    def decodes(self, ticket: AdmissionTicket, kv_tokens: int, *, over: int) -> bool:
        """Whether some place has room for the KV and the request's sequences, or none serves. `over`: for a
        tenant above its share."""
        places = self._decode
        if not places.listed or self._takes(places.listed[places.hint], ticket, kv_tokens, over=over):
            return True
        takes = self._all_take(places.rows, ticket, kv_tokens, over=over)
        places.hint = int(takes.argmax())
        return bool(takes[places.hint])

    def crowded(
        self, plan: Plan, ticket: AdmissionTicket, need: tuple[int, int], *, over: int
    ) -> frozenset[str]:
        """Return the workers without a place for `need` (KV tokens where the request decodes, and where it
        prefills if that is another worker), or none if the plan fits."""
        places, found = self._columns.places, frozenset[str]()
        if not self._takes(places[plan.decode].row, ticket, need[0], over=over):
            found = self._full(ticket, need[0], over=over)
        if plan.prefill is not None and (place := places[plan.prefill]).own.waiting:
            reserved = self._columns.ints.item(RESERVED, place.row)
            if reserved + need[1] > self._limits.kv[over].item(place.row):
                found |= {plan.prefill.worker_id}
        return found

    def busier(self, plan: Plan, ticket: AdmissionTicket, slack_s: float, now: float) -> frozenset[str]:
        """Return the workers with over `slack_s` more work left than the least busy one. Empty if the plan's
        place is not among them, or has enough of the prompt cached to make up for the wait."""
        rows = (self._whole if ticket.whole else self._prefill).rows
        if not len(rows):
            return frozenset()
        left = self._all_left_s(rows, now)
        row = self._columns.places[plan.prefill_target].row
        most = float(left.min()) + slack_s
        hit_s = plan.predicted_cached_tokens / self._columns.floats.item(TOKENS_PER_S, row)
        if self._left_s(row, now) <= most + hit_s:
            return frozenset()
        targets = self._columns.targets
        free = {targets[row].worker_id for row in rows[left <= most].tolist()}
        return frozenset(targets[row].worker_id for row in rows.tolist()) - free

    def _full(self, ticket: AdmissionTicket, kv_tokens: int, *, over: int) -> frozenset[str]:
        rows = self._decode.rows
        takes = self._all_take(rows, ticket, kv_tokens, over=over)
        targets = self._columns.targets
        free = {targets[row].worker_id for row in rows[takes].tolist()}
        return frozenset(targets[row].worker_id for row in rows.tolist()) - free

    def reserved_tokens(self) -> int:
        """KV reserved at all decoding places, in tokens."""
        return int(self._columns.ints[RESERVED, self._decode.rows].sum())

    def prefill_s(self, tokens: int) -> float:
        """Time to prefill `tokens` at the fastest place, in seconds."""
        rows = self._prefill.rows
        return tokens / float(self._columns.floats[TOKENS_PER_S, rows].max()) if len(rows) else 0.0

    def book(self, tokens: int) -> None:
        """Book KV at the place with the most of it free."""
        rows = self._decode.rows
        if len(rows):
            free = self._limits.kv[False][rows] - self._columns.ints[RESERVED, rows]
            self.booking = Booking(self._columns.targets[rows[int(free.argmax())]], tokens)

    def _kept(self, places: _Rows, *, over: int) -> int:
        """Number of idle places that are kept from a tenant above its share, or from spare capacity: a prompt
        that is being computed delays the next one, so others must find places without one."""
        if over == SPARE:
            part = 1.0 - self._rules.spare_share / 2
            return max(0, min(len(places.listed) - 1, math.ceil(part * len(places.listed))))
        if not over or len(places.listed) < _ENOUGH_PLACES:
            return 0
        return min(len(places.listed) - 1, math.ceil(self._rules.spare * len(places.listed)))

    def _left_s(self, row: int, now: float) -> float:
        """Work left at a place, in seconds."""
        floats = self._columns.floats
        per_s: float = floats.item(TOKENS_PER_S, row)
        head: float = floats.item(HEAD_TOKENS, row)
        done = min(head, (now - floats.item(HEAD_SINCE, row)) * per_s)
        tokens: float = self._columns.ints.item(QUEUED, row) - done
        steps = max(0.0, tokens - 1.0) // self._step_tokens.item(row)
        left: float = tokens / per_s + steps * floats.item(_PREFILL_FIXED, row)
        return left

    def _all_left_s(self, rows: IntColumn, now: float) -> NDArray[np.float64]:
        floats = self._columns.floats
        per_s = floats[TOKENS_PER_S, rows]
        done = np.minimum(floats[HEAD_TOKENS, rows], (now - floats[HEAD_SINCE, rows]) * per_s)
        tokens = self._columns.ints[QUEUED, rows] - done
        steps = np.maximum(tokens - 1.0, 0.0) // self._step_tokens[rows]
        left: NDArray[np.float64] = tokens / per_s + steps * floats[_PREFILL_FIXED, rows]
        return left

    def _ahead_tokens(self, rows: IntColumn, ahead_s: float) -> NDArray[np.float64]:
        """Tokens left at a place whose work left is `ahead_s`."""
        floats, a_step = self._columns.floats, self._step_tokens[rows]
        per_s = floats[TOKENS_PER_S, rows]
        whole_s = a_step / per_s + floats[_PREFILL_FIXED, rows]
        steps = ahead_s // whole_s
        tokens: NDArray[np.float64] = steps * a_step + np.minimum(a_step, (ahead_s - steps * whole_s) * per_s)
        return tokens

    def _takes(self, row: int, ticket: AdmissionTicket, kv_tokens: int, *, over: int) -> bool:
        ints, floats = self._columns.ints, self._columns.floats
        streams = ints.item(STREAMS, row)
        if not streams:
            return True
        booked = self.booking
        if booked is not None and not ticket.long and self._columns.targets[row] == booked.target:
            kv_tokens += booked.tokens
        streams += ticket.choices
        if ints.item(RESERVED, row) + kv_tokens > self._limits.kv[over].item(row):
            return False
        if streams > self._limits.seats[over].item(row):
            return False
        promised = self._rules.itl_slack * ticket.itl_s
        if not promised:
            return True
        fixed, each = floats.item(_STEP_FIXED, row), floats.item(_STEP_STREAM, row)
        # A limit that even one stream exceeds does not forbid a second one.
        return bool(fixed + streams * each <= promised or fixed + each > promised)

    def _all_take(self, rows: IntColumn, ticket: AdmissionTicket, kv_tokens: int, *, over: int) -> BoolColumn:
        ints, floats = self._columns.ints, self._columns.floats
        needed = np.full(len(rows), kv_tokens, dtype=np.int64)
        booked = self.booking
        if booked is not None and not ticket.long:
            place = self._columns.places.get(booked.target)
            if place is not None:
                needed[rows == place.row] += booked.tokens
        running = ints[STREAMS, rows]
        streams = running + ticket.choices
        takes: BoolColumn = ints[RESERVED, rows] + needed <= self._limits.kv[over][rows]
        takes &= streams <= self._limits.seats[over][rows]
        promised = self._rules.itl_slack * ticket.itl_s
        if promised:
            fixed, each = floats[_STEP_FIXED, rows], floats[_STEP_STREAM, rows]
            takes &= (fixed + streams * each <= promised) | (fixed + each > promised)
        takes |= running == 0
        return takes

    def _limited(self) -> _Limits:
        rules, columns = self._rules, self._columns
        kv, seats = [], []
        for target in columns.targets:
            identity = self._workers[target.worker_id].identity
            tokens = identity.kv_blocks * identity.kv.block_size
            kv.append(int(tokens * (1.0 - rules.headroom)) if tokens else _NO_LIMIT)
            seats.append(rules.seats.get(identity.pool, _NO_LIMIT))
        parts = (1.0 - rules.spare, rules.spare_share)
        return _Limits(_limited_to(kv, *parts), _limited_to(seats, *parts))


def _usable(able: list[bool], well: list[bool], ready: list[bool]) -> _Rows:
    """The rows that are able and healthy; if none is healthy, those that are able and ready."""
    found = np.flatnonzero(np.logical_and(able, well))
    return _Rows(found if len(found) else np.flatnonzero(np.logical_and(able, ready)))


def _limited_to(limits: list[int], over: float, spare: float) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Limits for everybody, and their parts for tenants above their share and for spare capacity, at least
    1."""
    whole = np.array(limits, dtype=np.int64)
    above, left = (np.maximum(1, np.floor(whole * part)).astype(np.int64) for part in (over, spare))
    return whole, above, left
