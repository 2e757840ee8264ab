"""Predictions of what workers will hold because of requests sent to them, kept until reports confirm them or
they expire.

A prediction covers the time between a decision and the worker's report, so that requests with a common prefix
that arrive together find each other. For a worker without reports, predictions are all there is.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass

from kvasir.native import PrefixTree

_TTL_PARTS = 16
_MAX_CONFIRMING = 65_536
_MAX_AGES = 4096


@dataclass(slots=True, init=False)
class _Live:
    """A prediction whose request has not ended. `number` is the tree's number for it."""

    group: int
    rank: int
    names: array[int]
    number: int
    made_s: float

    def __init__(self, group: int, rank: int, names: array[int], number: int, made_s: float) -> None:
        self.group = group
        self.rank = rank
        self.names = names
        self.number = number
        self.made_s = made_s


@dataclass(slots=True)
class _Age:
    """Predictions of one period, about as many blocks as one slice of work."""

    first_s: float
    last_s: float
    blocks: int


class Predictions:
    """Predictions of one tree, by worker.

    A prediction lives for `ttl_s`, or up to a sixteenth longer, unless it is settled. `slice_blocks` bounds
    how much expires at once. Handles are the tree's numbers at the time of `add`.
    """

    def __init__(self, tree: PrefixTree, *, ttl_s: float, confirm_s: float, slice_blocks: int) -> None:
        self._tree = tree
        self._ttl_s = ttl_s
        self._confirm_s = confirm_s
        self._slice_blocks = slice_blocks
        self._live: dict[str, OrderedDict[int, _Live]] = {}
        self._confirming: deque[tuple[float, str, int]] = deque()
        self._ages: deque[_Age] = deque()

    def add(self, worker_id: str, rank: int, group: int, names: array[int], now: float) -> int:
        """Predict that `group`, this rank of the worker, will hold `names`. Return the handle."""
        number = self._tree.predict(group, names, now)
        self._live.setdefault(worker_id, OrderedDict())[number] = _Live(group, rank, names, number, now)
        self._age(len(names), now)
        return number

    def forget(self, worker_id: str, handle: int) -> None:
        """Drop a prediction, except for blocks that another one predicts."""
        live = self._take(worker_id, handle)
        if live is not None:
            self._tree.settle(live.group, live.names, live.number)

    def keep(self, worker_id: str, handle: int) -> None:
        """A prediction came true without a report to come: it stays until it expires."""
        self._take(worker_id, handle)

    def confirm(self, worker_id: str, handle: int, now: float) -> None:
        """A prediction came true, and the report is on its way: `confirmed` returns it when the report was
        due."""
        self._confirming.append((now + self._confirm_s, worker_id, handle))
        if len(self._confirming) > _MAX_CONFIRMING:
            self.forget(*self._confirming.popleft()[1:])

    def confirmed(self, now: float) -> list[tuple[str, int]]:
        """Return worker and handle of predictions whose report was due; at most a slice."""
        due: list[tuple[str, int]] = []
        budget = self._slice_blocks
        while self._confirming and self._confirming[0][0] <= now and budget > 0:
            _, worker_id, handle = self._confirming.popleft()
            lives = self._live.get(worker_id)
            if lives is not None and handle in lives:
                due.append((worker_id, handle))
                budget -= len(lives[handle].names)
        return due

    def carry(self, worker_id: str, groups: tuple[int, ...], now: float) -> None:
        """Move a worker's pending predictions to other groups, the newest first, up to one slice."""
        budget = self._slice_blocks
        for live in reversed(self._live.get(worker_id, {}).values()):
            live.group = groups[live.rank]
            budget -= len(live.names)
            if budget >= 0:
                live.number = self._tree.predict(live.group, live.names, now)
                self._age(len(live.names), now)

    def drop(self, worker_id: str) -> None:
        """Drop a worker's predictions with its groups."""
        self._live.pop(worker_id, None)

    def expire(self, now: float) -> None:
        """Drop a slice of the expired predictions."""
        if not self._ages or self._ages[0].last_s + self._ttl_s > now:
            return
        before = math.nextafter(self._ages.popleft().last_s, math.inf)
        self._tree.expire(before)
        for worker_id, lives in list(self._live.items()):
            while lives and next(iter(lives.values())).made_s < before:
                lives.popitem(last=False)
            if not lives:
                del self._live[worker_id]

    def next_due(self) -> float | None:
        """Return when `confirmed` or `expire` is due."""
        expiry = self._ages[0].last_s + self._ttl_s if self._ages else None
        if self._confirming and (expiry is None or self._confirming[0][0] < expiry):
            return self._confirming[0][0]
        return expiry

    @property
    def workers(self) -> set[str]:
        """Workers with predictions whose requests have not ended."""
        return set(self._live)

    def _take(self, worker_id: str, handle: int) -> _Live | None:
        lives = self._live.get(worker_id)
        if lives is None:
            return None
        live = lives.pop(handle, None)
        if not lives:
            del self._live[worker_id]
        return live

    def _age(self, blocks: int, now: float) -> None:
        ages = self._ages
        if (
            ages
            and ages[-1].blocks < self._slice_blocks
            and now - ages[-1].first_s < self._ttl_s / _TTL_PARTS
        ):
            ages[-1].last_s = now
            ages[-1].blocks += blocks
        else:
            ages.append(_Age(now, now, blocks))
            if len(ages) > _MAX_AGES:
                # They expire with the next period.
                ages.popleft()
