"""`kvasir plan` says what to run for a load, writes what runs, and names what is wrong with its options."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from functools import cache
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helm.rendering import render, values

from kvasir_platform.cli.main import main

LOAD = ("--rate", "10", "--prompt-tokens", "1500/4000", "--output-tokens", "250/700", "--prefix-share", "0.3")
LLAMA = ("plan", "llama-3.1-8b", *LOAD, "--gpus", "H100,L40S")


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    found = capsys.readouterr()
    return status, found.out, found.err


@cache
def data(*arguments: str) -> dict[str, Any]:
    """The report as JSON; equal arguments run once."""
    with redirect_stdout(StringIO()) as out:
        assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_the_report_has_memory_plans_reasons_and_the_source_of_coefficients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = ran(capsys, *LLAMA)
    assert status == 0
    assert "HARDWARE" in out
    assert "1  " in out
    assert "limited by memory" in out
    assert "H100 data sheet" in out


def test_the_json_has_all_that_the_text_has() -> None:
    found = data(*LLAMA)
    plan = found["plans"][0]
    assert len(found["plans"]) == 3
    assert plan["ttft_s"]["low"] < plan["ttft_s"]["value"] <= found["slo"]["ttft_s"]
    assert plan["itl_s"]["value"] <= found["slo"]["itl_s"]
    assert plan["dollars_per_hour"] > plan["mean_dollars_per_hour"] > 0
    assert plan["day"]["scaled_hours"] < plan["day"]["fixed_hours"]
    assert {"input", "cached_input", "output"} == set(plan["dollars_per_million"])
    (h100,) = (each for each in found["memory"] if each["hardware"] == "H100")
    assert sum(h100["bytes"].values()) == pytest.approx(h100["budget_bytes"], rel=1e-6)
    assert h100["kv"][1]["users"] == pytest.approx(2 * h100["kv"][0]["users"], rel=0.01)


def test_prices_of_tokens_add_up_to_the_cost_of_the_day() -> None:
    found = data(*LLAMA)
    traffic = found["traffic"]
    computed = traffic["prompt_tokens"] - traffic["cached_tokens"]
    for plan in found["plans"]:
        price = plan["dollars_per_million"]
        request = (
            computed * price["input"]
            + traffic["cached_tokens"] * price["cached_input"]
            + traffic["output_tokens"] * price["output"]
        ) / 1e6
        assert request * traffic["rate"] * 3600 == pytest.approx(plan["mean_dollars_per_hour"])
        assert 0 < price["cached_input"] < price["input"] / 5 < price["output"]


def test_a_tighter_slo_and_a_higher_load_cost_more() -> None:
    usual, tight, busy = (
        data(*LLAMA, *more)["plans"][0]["dollars_per_hour"]
        for more in ((), ("--slo", "ttft=0.5,itl=0.02"), ("--peak", "60"))
    )
    assert usual < tight
    assert usual < busy


def test_the_arithmetic_and_the_advice_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, *LLAMA, "--explain", "--advice")
    assert status == 0
    for part in (
        "Little's law",
        "bandwidth: ",
        "KV heads: 8 for 32 query heads (GQA)",
        "Erlang C",
        "ridge: 989 TFLOP/s / 3.35 TB/s = 295",
        "interconnect?",
    ):
        assert part in out
    for name in ("prefix caching", "speculation", "FP8 weights", "FP8 KV", "autoscaling", "chunked prefill"):
        assert name in out


def test_a_model_that_fits_nowhere_is_said_not_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "plan", "llama-3.1-405b", "--gpus", "L4:4", "--advice")
    assert status == 1
    assert "short by" in out
    assert "the model fits on none of this hardware" in out
    assert "as it is, it fits on" in out
    assert "no: fits?" in out


def test_a_lower_precision_is_proposed_where_it_makes_a_model_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = ran(capsys, "plan", "llama-3.1-8b", "--gpus", "RTX-4090:1", "--prompt-tokens", "60000")
    assert status == 1
    assert "with --quantization fp8 it fits on 1 x RTX-4090, fp8" in out


def test_int8_is_proposed_where_fp8_is_not_computed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "plan", "llama-3.1-8b", "--gpus", "A10:1", "--prompt-tokens", "60000")
    assert status == 1
    assert "with --quantization int8 it fits on 1 x A10, int8" in out


def test_a_plan_in_int8_is_written_as_workers_serve_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("plan", "llama-3.1-8b", "--gpus", "A10,T4", "--quantization", "int8")
    status, out, _ = ran(capsys, *arguments, "--write", str(tmp_path))
    assert status == 0
    assert "1 x A10, int8" in out
    spec = tmp_path / "kvasir.yaml"
    assert "quantization: int8" in spec.read_text(encoding="utf-8")
    assert ran(capsys, "config", "validate", "-f", str(spec))[0] == 0


def test_a_plan_in_int8_for_this_machine_is_ready_to_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("plan", "kvasir-tiny", "--gpus", "CPU:1", "--prompt-tokens", "200", "--output-tokens", "50")
    assert ran(capsys, *arguments, "--quantization", "int8", "--write", str(tmp_path))[0] == 0
    status, out, _ = ran(capsys, "check", "-f", str(tmp_path / "kvasir.yaml"), "--port", "0")
    assert status == 0, out


def test_an_slo_that_no_number_of_replicas_meets_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(
        capsys, "plan", "llama-3.1-70b", "--gpus", "A100:16", "--slo", "itl=0.001", "--advice"
    )
    assert status == 1
    assert "no plan meets the SLO" in out
    assert "no: bandwidth?" in out


def test_no_plan_takes_more_gpus_than_there_are() -> None:
    found = data("plan", "llama-3.1-8b", "--rate", "8", "--gpus", "H100:2,L40S:3")
    for plan in found["plans"]:
        used: dict[str, int] = {}
        for pool in plan["pools"]:
            used[pool["hardware"]] = used.get(pool["hardware"], 0) + pool["replicas"] * pool["devices"]
        assert used.get("H100", 0) <= 2
        assert used.get("L40S", 0) <= 3


def test_batches_show_what_limits_a_step_and_what_a_token_costs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, *LLAMA, "--batches")
    assert status == 0
    assert "H100: memory limits below 295 operations per byte" in out
    rows = [row for row in data(*LLAMA)["batches"] if row["engine"] == "1 x H100"]
    assert [row["batch"] for row in rows] == [0, 1, 4, 16, 64]
    assert [row["limit"] for row in rows] == ["compute", *["memory"] * 4]
    assert rows[1]["operations_per_byte"] == pytest.approx(1, abs=0.2)
    for before, after in pairwise(rows[1:]):
        assert after["tokens_per_s"] > before["tokens_per_s"]
        assert after["dollars_per_million"] < before["dollars_per_million"]
    for row in rows:
        assert row["within_itl"] == (None if row["batch"] == 0 else row["step_s"] <= 0.05)
        assert row["of_peak"] < 0.5
        assert row["of_bandwidth"] < 0.7


def test_batches_that_keep_the_itl_are_marked_and_the_largest_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slo = ("--slo", "itl=0.03")
    arguments = ("plan", "llama-3.1-8b", "--gpus", "A10", *slo, "--batches")
    _, out, _ = ran(capsys, *arguments)
    rows = [line.split() for line in out.splitlines() if line.startswith("1 x A10")]
    assert [line[-1] for line in rows] == ["-", "NO", "NO", "NO", "-", "yes", "yes", "yes", "NO"]
    assert "ITL within 30 ms, without prompts beside it: 1 x A10: none; 1 x A10, int8: 16" in out


def test_every_layout_has_a_reason_for_or_against_it() -> None:
    found = data("plan", "llama-3.1-70b", "--rate", "4", "--gpus", "H100:16")["layouts"]
    reasons = {row["layout"]: row["reason"] for row in found}
    assert "does not fit by 63.0 GiB" in reasons["one device"]
    assert "takes 32 devices, and there are 16" in reasons["TP 8 PP 4"]
    assert "replica" in reasons["TP 4"]
    exchange = {row["layout"]: row["communication"] for row in found}
    assert exchange["one device"] == 0 < exchange["TP 2"] < exchange["TP 4"] < exchange["TP 8"]


def test_embeddings_get_a_pool_without_itl(tmp_path: Path) -> None:
    arguments = ("plan", "bge-m3", "--rate", "100", "--prompt-tokens", "400", "--gpus", "L4")
    found = data(*arguments, "--write", str(tmp_path))
    assert found["plans"][0]["mode"] == "embedding"
    assert found["plans"][0]["dollars_per_million"]["output"] is None
    assert main(["config", "validate", "-f", str(tmp_path / "kvasir.yaml")]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        (*LLAMA, "--mode", "disaggregated", "--quantization", "any", "--kv-dtype", "any"),
        (*LLAMA, "--mode", "aggregated", "--speculate", "3"),
        ("plan", "qwen3-30b-a3b", "--gpus", "A100", "--rate", "5"),
        ("plan", "deepseek-v3", "--gpus", "H100", "--rate", "5"),
    ],
    ids=["disaggregated", "speculating", "experts", "nodes"],
)
def test_what_is_written_is_valid_for_kvasir_and_for_the_chart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert ran(capsys, *arguments, "--write", str(tmp_path))[0] == 0
    assert ran(capsys, "config", "validate", "-f", str(tmp_path / "kvasir.yaml"))[0] == 0
    assert render(values(tmp_path / "values.yaml")).of_kind("RayCluster")


def test_a_written_plan_for_this_machine_is_ready_to_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("plan", "kvasir-tiny", "--gpus", "CPU:1", "--prompt-tokens", "200", "--output-tokens", "50")
    assert ran(capsys, *arguments, "--write", str(tmp_path))[0] == 0
    status, out, _ = ran(capsys, "check", "-f", str(tmp_path / "kvasir.yaml"), "--port", "0")
    assert status == 0, out
    assert "ready to start" in out


def test_a_config_json_alone_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
             "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
             "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    found = data("plan", "--config", str(folder / "config.json"), "--gpus", "H100")
    assert found["model"]["name"] == "my-model"
    assert found["model"]["weights_counted"]


def test_a_workload_gives_the_load() -> None:
    found = data("plan", "llama-3.1-8b", "--workload", "chat:rate=5,duration=600", "--gpus", "H100")
    assert found["traffic"]["rate"] == pytest.approx(5, rel=0.2)
    assert found["traffic"]["cached_tokens"] > 0


def test_prices_of_a_file_change_the_cost(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text("gpus: [{name: H100, dollars_per_hour: 29.9}]")
    arguments = ("plan", "llama-3.1-8b", "--gpus", "H100", "--mode", "aggregated")
    cheap, dear = (
        data(*arguments, *more)["plans"][0]["dollars_per_hour"] for more in ((), ("--catalogue", str(path)))
    )
    assert dear == pytest.approx(10 * cheap)


def test_a_cautious_plan_is_larger_and_meets_the_slo_with_the_slowest_coefficients() -> None:
    usual, found = data(*LLAMA), data(*LLAMA, "--cautious")
    assert found["plans"][0]["dollars_per_hour"] > usual["plans"][0]["dollars_per_hour"]
    assert found["plans"][0]["ttft_s"]["high"] <= found["slo"]["ttft_s"]
    assert found["plans"][0]["goodput"]["low"] >= 0.9 * found["traffic"]["peak"]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_has_charts_and_needs_no_other_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    assert ran(capsys, *LLAMA, "--html", str(path))[0] == 0
    found = _Tags()
    found.feed(path.read_text(encoding="utf-8"))
    assert found.tags.count("svg") == 2
    assert found.tags.count("polyline") >= 4
    assert found.addresses == []
    assert "script" not in found.tags


def test_the_chart_is_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert ran(capsys, *LLAMA, "--png", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name either a model or --config"),
        (("llama-3.1-8b", "--config", "config.json"), "name either a model or --config"),
        (("llama-3.1-8b", "--gpus", "H1000"), "H1000 is not in the catalogue"),
        (("llama-3.1-8b", "--gpus", "H100:many"), "a number of devices"),
        (("llama-3.1-8b", "--gpus", "H100,H100:2"), "named twice"),
        (("llama-3.1-8b", "--rate", "5", "--peak", "1"), "below the mean"),
        (("llama-3.1-8b", "--workload", "chat", "--rate", "5"), "leave one out"),
        (("llama-3.1-8b", "--workload", "chats"), "chats is no preset"),
        (("llama-2-7b", "--prompt-tokens", "9000"), "4096 positions"),
        (("llama-3.1-8b", "--max-model-len", "100"), "the longest request has 1250 tokens"),
        (("llama-3.1-8b", "--catalogue", "none.yaml"), "no such file"),
        (("--config", "other.json"), "is called config.json"),
        (("llama-3.1-8b", "--quantization", "int8", "--gpus", "B200,A10"), "no int8 kernels for B200"),
        (("gpt-oss-20b", "--quantization", "int8"), "it is quantized already"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    status, _, err = ran(capsys, "plan", *arguments)
    assert status == 2
    assert said in err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--slo", "ttfb=1"),
        ("--slo", "ttft=0"),
        ("--slo", "attainment=1.5"),
        ("--prompt-tokens", "100/50"),
        ("--prefix-share", "2"),
        ("--rate", "0"),
        ("--speculate", "99"),
    ],
)
def test_a_value_out_of_range_is_refused(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "llama-3.1-8b", option, value])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err
