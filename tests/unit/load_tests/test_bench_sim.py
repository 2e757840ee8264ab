"""The bench of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from load_tests.scenarios.simulator import run as sim


class Inline(Executor):
    """Runs what is submitted at once, in this process."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args, **kwargs))
        return done


@pytest.mark.soak
def test_a_quick_run_measures_every_row_and_writes_no_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim, "run_all", lambda _output: [])
    monkeypatch.setattr(sim, "write", lambda *_: pytest.fail("a report of a quick run"))
    monkeypatch.setattr(sim, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(sim, "SMALL", 2)
    sim.main(["--quick"])
    printed = capsys.readouterr().err
    for row in (
        "2 workers",
        "20 s on 10 workers",
        "seeds of 4 that replay exactly: 4",
        "of the fluid bound, chat, cost",
    ):
        assert row in printed


def test_long_conversations_are_what_the_note_says() -> None:
    setting = sim.long_setting(2, 30.0, 0.5)
    workload = setting.workload
    assert len(workload.requests) == pytest.approx(30, rel=0.6)
    assert workload.prompt_tokens / len(workload.requests) > 8_000
