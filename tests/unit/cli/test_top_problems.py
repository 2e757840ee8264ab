"""`kvasir top` names everything that is wrong, as far as there is room, and says how much is left out."""

from __future__ import annotations

from textual.widgets import Static

from kvasir_platform.cli.top.screen import TopScreen
from kvasir_platform.cli.top.snapshot import TopSnapshot
from kvasir_platform.cli.top.tables import MOST_ALSO, heading


def troubled(count: int) -> TopSnapshot:
    problems = [{"text": f"problem {i}"} for i in range(count)]
    verdict = {"ok": False, "sentence": "Requests fail: problem 0.", "problems": problems}
    requests = {"in_flight": 0, "queued": 0, "running": [], "slowest": [], "latest": []}
    return TopSnapshot(1.0, {"workers": [], "queues": {}, "verdict": verdict}, requests, {})


def test_all_further_problems_are_named_below_the_sentence() -> None:
    shown, _ = heading(troubled(6))
    assert shown.splitlines() == ["Requests fail: problem 0.", *(f"Also: problem {i}" for i in range(1, 6))]


def test_problems_that_are_left_out_are_counted() -> None:
    shown, _ = heading(troubled(1 + MOST_ALSO + 2))
    *_, last, left_out = shown.splitlines()
    assert last == f"Also: problem {MOST_ALSO}"
    assert left_out == "2 more: kvasir status shows all."


async def test_a_larger_terminal_shows_more_problems() -> None:
    for height, count in ((12, 3), (24, 6), (48, 12)):
        snapshot = troubled(20)
        screen = TopScreen(lambda: troubled(20), snapshot, interval_s=3600.0)
        async with screen.run_test(size=(80, height)):
            lines = str(screen.query_one("#verdict", Static).render()).splitlines()
        assert lines[1:-1] == [f"Also: problem {i}" for i in range(1, count + 1)]
        assert lines[-1] == f"{19 - count} more: kvasir status shows all."
