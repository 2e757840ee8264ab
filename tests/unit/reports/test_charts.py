"""Charts show every point that is a number, on axes whose labels are round, as SVG and as PNG."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.reports.charts import LineChart, PlottedLine, bar_chart, line_chart
from kvasir_platform.reports.document import charts, document, table
from kvasir_platform.reports.files import read_json, write_file
from kvasir_platform.reports.png import draw


def chart(*lines: PlottedLine, logarithmic: bool = False, mark: float | None = None) -> LineChart:
    return LineChart("Cost & <time>", "ms", "dollars", lines, logarithmic=logarithmic, mark=mark)


def places(svg: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'<polyline points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in path.split())]


def labels(svg: str, anchor: str) -> list[str]:
    return re.findall(rf'text-anchor="{anchor}">([^<]*)<', svg)


def test_a_line_rises_from_left_to_right_between_round_labels() -> None:
    svg = line_chart(chart(PlottedLine("a", ((1.0, 0.0), (2.0, 470.0), (3.0, 940.0)))))
    (left, low), (middle, _), (right, high) = places(svg)
    assert left < middle < right
    assert middle - left == pytest.approx(right - middle)
    assert low > high
    assert labels(svg, "end") == ["0", "200", "400", "600", "800", "1,000"]
    assert labels(svg, "middle") == ["1", "2", "3", "ms"]


def test_a_logarithmic_axis_puts_equal_factors_equally_far_apart_and_leaves_out_zero() -> None:
    line = PlottedLine("a", ((0.0, 1.0), (1.0, 1.0), (10.0, 2.0), (100.0, 3.0)))
    first, second, third = places(line_chart(chart(line, logarithmic=True)))
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.2)


def test_what_is_no_number_is_left_out_and_without_points_there_is_no_figure() -> None:
    assert (
        len(places(line_chart(chart(PlottedLine("a", ((1.0, math.nan), (2.0, 1.0), (3.0, math.inf))))))) == 1
    )
    assert line_chart(chart(PlottedLine("a", ((1.0, math.nan),)))) == ""
    assert line_chart(chart()) == ""


def test_few_points_are_marked_and_many_are_not() -> None:
    few = PlottedLine("few", tuple((float(x), 1.0) for x in range(5)))
    many = PlottedLine("many", tuple((float(x), 1.0) for x in range(100)))
    assert line_chart(chart(few)).count("<circle") == 5
    assert line_chart(chart(many)).count("<circle") == 0


def test_a_mark_is_drawn_where_it_is_even_beside_the_points() -> None:
    svg = line_chart(chart(PlottedLine("a", ((2.0, 1.0), (3.0, 1.0))), mark=1.0))
    (x,) = re.findall(r'class="mark" x1="([\d.]*)"', svg)
    assert float(x) < places(svg)[0][0]


def test_names_and_titles_are_escaped_and_each_line_has_its_colour_in_the_key() -> None:
    svg = line_chart(chart(PlottedLine("<a>", ((1.0, 1.0),)), PlottedLine("b", ((1.0, 2.0),), dashed=True)))
    assert "Cost &amp; &lt;time&gt;, dollars" in svg
    assert "&lt;a&gt;" in svg
    assert re.findall(r'background: var\((--c\d)\)"></s>([^<]*)', svg) == [
        ("--c1", "&lt;a&gt;"),
        ("--c2", "b"),
    ]
    assert svg.count("stroke-dasharray") == 1


def test_bars_are_as_high_as_their_values() -> None:
    svg = bar_chart("Time", "ms", ("x", "y"), (("one", (10.0, 20.0)), ("two", (40.0, math.nan))))
    heights = [float(each) for each in re.findall(r'height="([\d.]*)" fill', svg)]
    assert heights[1] > 100
    assert heights == pytest.approx([heights[1] / 4, heights[1], heights[1] / 2, 0.0], abs=0.1)


def test_lines_are_drawn_as_a_png(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    line = PlottedLine("a", ((0.0, 1.0), (1.0, 2.0)))
    draw([chart(line), chart(line, logarithmic=True, mark=2.0)], path, "about")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--png .*missing"):
        draw([chart(line)], tmp_path / "missing" / "chart.png")


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"install kvasir\[charts\]"):
        draw((), tmp_path / "chart.png")


def test_a_document_is_whole_and_its_tables_escape_their_cells() -> None:
    shown = table(("name", "value"), [("<a>", "1"), ("b", "2")], words=True, classes=("pass", "fail"))
    page = document("A & b", charts([shown]), style=".own{}", script="run()")
    assert page.startswith("<!doctype html>")
    assert page.endswith("<script>run()</script></body></html>\n")
    assert "<title>A &amp; b</title>" in page
    assert '<tr class="pass"><td>&lt;a&gt;</td><td>1</td></tr>' in page
    assert ".own{}</style>" in page
    assert "<script>" not in document("A", "")


def test_a_file_is_read_as_it_was_written_and_an_error_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_file(path, '{"a": [1]}', "--json")
    assert read_json(path, 1 << 20, "--baseline x") == {"a": [1]}
    with pytest.raises(ConfigError, match="--baseline x: larger than 0 MiB"):
        read_json(path, 1, "--baseline x")
    with pytest.raises(ConfigError, match="--baseline x: No such file"):
        read_json(tmp_path / "other.json", 1, "--baseline x")
    write_file(path, "no", "--json")
    with pytest.raises(ConfigError, match="--baseline x: no JSON: "):
        read_json(path, 1 << 20, "--baseline x")
