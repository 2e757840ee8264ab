"""What operators see of the cells: in the verdict, and in the table of `kvasir status`."""

from __future__ import annotations

import io
import json

import msgspec

from kvasir.ports.router import CellModelView, CellView
from kvasir_platform.cli.commands.status.cells import cell_rows, print_cells
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.gateway.operator.verdict import StatusFacts, problems_of

MODEL = CellModelView("tiny", "0123456789abcdef", 2, 0.25, 1000, 0.0, 0.0)
HERE = CellView("eu", "here", network_s=0.0, models=(MODEL,), received=3, sent={"nearest": 7})
AWAY = CellView("us", "unreachable", reason="no answer for 1.0 s", in_flight=2, lost=4)


def test_a_cell_that_cannot_be_reached_is_a_warning_and_names_it() -> None:
    (problem,) = problems_of(StatusFacts(cells=(HERE, AWAY, CellView("ap", "stale"))))
    assert (problem.severity, problem.code, problem.subject) == ("warning", "cell_away", "us")
    assert problem.text == "cell us is unreachable: no answer for 1.0 s"


def test_each_cell_has_a_line_and_each_further_model_one_more() -> None:
    two = CellView("ap", "fresh", network_s=0.12, models=(MODEL, MODEL))
    shown = [json.loads(msgspec.json.encode(each)) for each in (HERE, AWAY, two)]
    assert cell_rows(shown[0]) == [
        ("eu", "here", "0 ms", "tiny", "0123456789ab", "2", "0.2 s", "7", "3", "0", "")
    ]
    assert cell_rows(shown[1]) == [
        ("us", "unreachable", "-", "-", "-", "0", "-", "0", "2", "4", "no answer for 1.0 s")
    ]
    assert [row[:3] for row in cell_rows(shown[2])] == [("ap", "fresh", "120 ms"), ("", "", "")]


def test_without_regions_there_is_no_table() -> None:
    out = io.StringIO()
    print_cells([], CommandOutput(json=False, out=out))
    assert out.getvalue() == ""
    print_cells([json.loads(msgspec.json.encode(HERE))], CommandOutput(json=False, out=out))
    assert "0123456789ab" in out.getvalue()
