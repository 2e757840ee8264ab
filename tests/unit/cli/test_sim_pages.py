"""Pages of `kvasir sim` in a browser: they show the run's figures, write no error and ask no other host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.browser.charts import open_charts
from tests.kit.browser.chromium import OpenedPage, open_page

from kvasir_platform.cli.main import main


def figures(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["sim", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def sound(page: OpenedPage) -> None:
    assert page.console == ()
    assert page.foreign == ()


def test_the_page_of_a_run_plays_queues_batches_kv_and_transfers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.html"
    options = ("--prefill", "2", "--decode", "2", "--workload", "rag:rate=10,duration=20")
    found = figures(capsys, *options, "--faults", "crash@8:1:4", "--html", str(file))
    middle = open_page(f"{file.as_uri()}#t=0.5", "sim-run")
    sound(middle)
    assert 'data-ready="yes"' in middle.html
    assert f"{found['requests']} requests" in middle.text
    assert f"{found['goodput']:.2f} goodput" in middle.text
    assert f"{found['hit_rate']:.1%} hits of an infinite cache" in middle.text
    assert "prefill pool prefill-0 queue" in middle.text
    assert "prefill-1 lost" in middle.text
    end = open_page(f"{file.as_uri()}#t=1", "sim-run-end", dark=True)
    sound(end)
    assert f"{found['requests']} ended" in end.text
    assert f"{round(found['met_slo'] * found['requests'])} met the SLO" in end.text
    assert len(file.read_bytes()) < 400_000


def test_the_page_of_a_comparison_shows_each_policy_beside_the_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "policies.html"
    options = ("--policies", "cost,round_robin", "--workers", "2", "--workload", "rag:rate=20,duration=4")
    found = figures(capsys, "compare", *options, "--html", str(file))
    page, charts = open_charts(file, "sim-compare", tmp_path)
    sound(page)
    assert [(chart.name, chart.cut) for chart in charts] == [("Goodput, % of the bound", ())]
    for each in found["policies"]:
        assert f"{each['policy']} {each['goodput']:.2f} {each['of_bound']:.1%}" in page.text
        assert f" {100 * each['of_bound']:.3g} " in page.text
    assert f"The bound is {found['bound']['requests_per_s']:.2f} requests/s" in page.text


def test_the_showcase_is_one_page_with_the_findings_of_seven_experiments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "showcase.html"
    found = figures(capsys, "showcase", "--html", str(file))
    experiments = {each["name"]: each for each in found["experiments"]}
    assert list(experiments) == [
        "static",
        "continuous",
        "caching",
        "speculation",
        "gpus",
        "breaking",
        "sizes",
    ]
    page, charts = open_charts(file, "sim-showcase", tmp_path, height=4600)
    sound(page)
    for each in experiments.values():
        assert each["finding"] in page.text
    assert len(charts) >= 9
    assert [chart.cut for chart in charts if chart.cut] == []
    ttft = experiments["static"]["figures"]["ttft_p99_s"]
    assert ttft["static, 4"] > ttft["static, 64"] > 10 * ttft["continuous"]
    goodput = experiments["continuous"]["figures"]["goodput"]
    assert goodput["continuous"] > 2 * goodput["dynamic"]
    cached = experiments["caching"]["figures"]["ttft_p50_s"]
    assert cached["on the GPU"] < 0.5 * cached["no cache"]
    tpot = experiments["gpus"]["figures"]["tpot_s"]
    assert tpot["1"] > tpot["2"] > tpot["4"] > tpot["8"] > tpot["1"] / 8
    assert (
        experiments["speculation"]["figures"]["tpot_s"]["best"]
        < 0.6 * (experiments["speculation"]["figures"]["tpot_s"]["plain"])
    )
    assert experiments["breaking"]["figures"]["holds"] > 4
    sizes = experiments["sizes"]["figures"]["tpot_s"]
    assert sizes["7B INT8"] < sizes["7B"] < sizes["70B"]


def test_a_page_that_fails_or_asks_another_host_is_noticed(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    later = 'setTimeout(() => fetch("http://later.example/"), 3000)'
    image = '<img src="http://elsewhere.example/x.png">'
    bad.write_text(f"<p>text</p>{image}<script>{later}; missing();</script>")
    page = open_page(bad, "bad")
    assert [line for line in page.console if "missing is not defined" in line]
    assert page.foreign == ("http://elsewhere.example/x.png", "http://later.example/")
