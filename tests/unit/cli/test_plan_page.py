"""The page of `kvasir plan` in a browser: charts are drawn whole, and nothing is fetched or goes wrong."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.kit.browser.chromium import open_page

from kvasir_platform.cli.main import main

PROBE = """<script>
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
  inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
const charts = [...document.querySelectorAll("svg")].map(svg => ({
  id: svg.id, width: svg.getBoundingClientRect().width, lines: svg.querySelectorAll("polyline.line").length,
  outside: [...svg.querySelectorAll("text, polyline, circle")].filter(
    each => outside(each.getBoundingClientRect(), svg.getBoundingClientRect())).map(each => each.textContent),
}));
document.body.dataset.charts = JSON.stringify(charts);
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    load = ("--rate", "10", "--prompt-tokens", "1500/4000", "--prefix-share", "0.3")
    assert main(["plan", "llama-3.1-8b", *load, "--gpus", "H100,A100,L40S,L4", "--html", str(path)]) == 0
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_shows_the_plan_and_writes_no_error(page: Path, tmp_path: Path, dark: bool) -> None:
    name = "plan-dark" if dark else "plan"
    opened = open_page(page, name, tmp_path, dark=dark, height=3200)
    assert opened.console == ()
    assert opened.foreign == ()
    for shown in ("Plan for llama-3.1-8b", "Cost against ITL", "interconnect?", "prefix caching", "Erlang C"):
        assert shown in opened.text


def test_charts_are_drawn_whole(page: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    whole = page.read_text(encoding="utf-8")
    probed.write_text(whole.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    opened = open_page(probed, "plan-probed", tmp_path)
    (text,) = re.findall(r'data-charts="([^"]*)"', opened.html)
    charts: list[dict[str, Any]] = json.loads(unescape(text))
    assert [chart["id"] for chart in charts] == ["chart-itl", "chart-ttft"]
    for chart in charts:
        assert chart["lines"] == 5
        assert chart["width"] > 300
        assert chart["outside"] == []
