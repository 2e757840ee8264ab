"""`kvasir scale` and `kvasir explain scaling`: requests and text output."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.commands.explain.scaling import explain_scaling, lines
from kvasir_platform.cli.commands.scale import scale
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.main import parser
from kvasir_platform.cluster.local.commands import SOCKET, CommandSocket, ControlCommand, socket_path

POOL: dict[str, Any] = {
    "pool": "decode",
    "role": "decode",
    "serving": 2,
    "starting": 1,
    "size": 3,
    "applied": True,
    "load": 1.4,
    "expected": 1.6,
    "upper": 2.2,
    "predictor": "the trend",
    "margin": 1.15,
    "need": 2.3,
    "horizon_s": 130.0,
    "because": ["includes queued work"],
    "why": "1.4 busy, up to 2.2 predicted within 130 s by the trend; includes queued work",
    "capacity": {
        "prompt_tokens_s": 9000.0,
        "output_tokens_s": 2000.0,
        "streams": 64,
        "spare": 0.12,
        "full_by": "memory",
    },
}
ACT = {"ago_s": 30.0, "pool": "decode", "what": "start", "count": 1, "why": "more comes", "done": True}
STORY: dict[str, Any] = {
    "mode": "auto",
    "frozen": None,
    "pins": {},
    "pools": [POOL],
    "acts": [ACT],
    "by_hand": [],
}


class Control:
    """Answers each command with the next answer."""

    def __init__(self, commands: CommandSocket, answers: list[tuple[str, dict[str, object]]]) -> None:
        self.asked: list[ControlCommand] = []
        self._commands, self._answers = commands, answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for event, details in self._answers:
            while (found := self._commands.wait(5.0)) is None:
                pass
            self.asked.append(found[0])
            found[1].tell(event, **details)

    def done(self) -> list[ControlCommand]:
        self._thread.join(timeout=5)
        return self.asked


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandSocket]:
    made = CommandSocket(socket_path(tmp_path))
    monkeypatch.setenv(SOCKET, str(socket_path(tmp_path)))
    yield made
    made.close()


def test_each_pool_is_asked_for_its_size_or_given_back(
    commands: CommandSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    control = Control(commands, [("done", {"replicas": 4}), ("done", {"replicas": None})])
    assert scale(["decode=4", "prefill=auto"], None, CommandOutput(json=False)) == 0
    assert control.done() == [ControlCommand("scale", "decode", 4), ControlCommand("unpin", "prefill")]
    said = capsys.readouterr().out
    assert "decode is set to 4" in said
    assert "prefill is sized by the planner" in said


@pytest.mark.parametrize("desired", ["decode", "=4", "decode=", "decode=-1", "decode=many", "decode=1.5"])
def test_what_is_no_size_is_refused_with_how_to_write_one(desired: str) -> None:
    with pytest.raises(ConfigError, match="write decode=4"):
        scale([desired], None, CommandOutput(json=False))


def test_a_refusal_is_passed_on(commands: CommandSocket) -> None:
    control = Control(commands, [("refused", {"message": "3 at most (scaling.max)"})] * 2)
    with pytest.raises(ConfigError, match=r"scaling\.max"):
        scale(["decode=9"], None, CommandOutput(json=False))
    with pytest.raises(ConfigError, match=r"scaling\.max"):
        explain_scaling(None, CommandOutput(json=False))
    assert control.done()[1] == ControlCommand("explain", "")


def test_sizes_are_explained_with_figures_rules_and_what_was_done() -> None:
    said = "\n".join(lines(STORY))
    assert "the planner sizes the pools" in said
    assert "decode      2      1       3" in said
    assert POOL["why"] in said
    assert "full with 64 streams, by KV memory" in said
    assert "30 s ago  decode: 1 started: more comes" in said


def test_advice_and_standstill_are_said_first() -> None:
    advised = lines(STORY | {"mode": "advise", "acts": [ACT | {"done": False}]})
    assert advised[0] == "scaling.mode is advise: actions are shown, not taken"
    assert "would be decode: 1 started" in advised[-1]
    frozen = lines(STORY | {"frozen": "no report from router-1 for 20 s"})
    assert frozen[0] == "sizes are unchanged: no report from router-1 for 20 s"
    nothing = lines(STORY | {"pools": [POOL | {"capacity": None, "why": "2 replicas"}], "acts": []})
    assert nothing[-1] == "decode: 2 replicas"


def test_sizes_set_by_hand_are_explained_beside_planned_ones_and_alone() -> None:
    why = "set by `kvasir scale`"
    other = {"pool": "vectors", "serving": 1, "size": 2, "why": why}
    said = lines(STORY | {"by_hand": [other]})
    assert said[0] == "the planner sizes the pools"
    assert said[-1].split() == ["vectors", "1", "2", *why.split()]
    alone = lines({"by_hand": [other]})
    assert alone[0].startswith("no planner: sizes are the spec's, or set by `kvasir scale`")
    assert alone[-1] == said[-1]


def test_the_command_line_names_pools_and_their_sizes() -> None:
    assert parser().parse_args(["scale", "decode=4", "prefill=auto"]).desired_sizes == [
        "decode=4",
        "prefill=auto",
    ]
