"""A sleep ends no earlier than asked, and wakes up seldom where timers of event loops are early."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvasir.clock import MonotonicClock


class EarlyLoop:
    """An event loop whose timers end `early_s` too early, and that rounds to milliseconds, as uvloop's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, early_s: float) -> None:
        self.now = 100.0
        self.waits = 0
        self._early_s = early_s
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.waits += 1
        assert self.waits < 10, "it spins"
        self.now += max(0.0, round(seconds, 3) - self._early_s)


@pytest.mark.parametrize(("seconds", "most"), [(0.05, 1), (0.3, 1), (0.0204, 3), (0.0004, 2)])
def test_a_sleep_wakes_up_seldom_and_not_too_early(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    loop = EarlyLoop(monkeypatch, early_s=0.0005)
    with pytest.raises(StopIteration):
        MonotonicClock().sleep(seconds).send(None)
    assert loop.now >= 100.0 + seconds
    assert loop.waits <= most
