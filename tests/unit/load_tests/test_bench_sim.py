"""The bench of the simulator."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from load_tests.report import Row
from load_tests.scenarios.simulator import plans
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


def test_plans_alone_are_measured_beside_the_rows_that_the_report_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = [Row("plan of a model", 9.0, "s", "lower"), Row("showcase", 3.0, "s", "lower")]
    fresh = Row("plan of a model", 1.0, "s", "lower")
    written: list[Row] = []
    monkeypatch.setattr(sim, "read", lambda _path: stored)
    monkeypatch.setattr(sim, "plan_rows", lambda *_: iter([fresh]))
    monkeypatch.setattr(sim, "simulated", lambda **_: pytest.fail("more than plans"))
    monkeypatch.setattr(sim, "write", lambda _name, _command, rows: written.extend(rows))
    assert sim.main(["--only", "plan"]) == 0
    assert written == [stored[1], fresh]
    monkeypatch.setattr(sim, "write", lambda *_: pytest.fail("a report of a quick run"))
    assert sim.main(["--only", "plan", "--quick"]) == 0


def test_the_time_of_plans_is_the_median_of_rounds_and_all_of_them_in_turn_have_a_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([1.0, 1.0, 1.0, 1.0, 2.0, 1.5, 1.5, 1.5, 4.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(plans, "seconds_of", lambda _model: next(seconds))
    first, *_, whole = plans.plan_rows()
    assert (first.value, first.spread, first.met) == (2.0, (1.0, 4.0), None)
    assert (whole.value, whole.spread, whole.met) == (6.5, (4.0, 7.0), False)


def test_the_plans_that_are_timed_are_whole_commands_that_find_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plans.seconds_of("llama-3.1-8b") > 0.0
    monkeypatch.setattr(plans, "GPUS", ("T4:1",))
    with pytest.raises(subprocess.CalledProcessError):
        plans.seconds_of("llama-3.1-70b")
