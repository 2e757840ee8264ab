"""The page of `kvasir plan` in a browser: charts are drawn whole, and nothing is fetched or goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.browser.charts import open_charts

from kvasir_platform.cli.main import main


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    load = ("--rate", "10", "--prompt-tokens", "1500/4000", "--prefix-share", "0.3")
    assert main(["plan", "llama-3.1-8b", *load, "--gpus", "H100,A100,L40S,L4", "--html", str(path)]) == 0
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_shows_the_plan_and_whole_charts_and_writes_no_error(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    name = "plan-dark" if dark else "plan"
    opened, charts = open_charts(page, name, tmp_path, dark=dark, height=3200)
    assert opened.console == ()
    assert opened.foreign == ()
    for shown in ("Plan for llama-3.1-8b", "Cost against ITL", "interconnect?", "prefix caching", "Erlang C"):
        assert shown in opened.text
    assert [chart.name.partition(",")[0] for chart in charts] == ["Cost against ITL", "Cost against TTFT"]
    for chart in charts:
        assert chart.lines == 5
        assert chart.width > 300
        assert chart.cut == ()
