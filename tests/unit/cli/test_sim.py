"""`kvasir sim`: options become a run, and a run becomes figures that agree with it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.main import main
from kvasir_platform.cli.sim.arguments import add_sim_options, settle
from kvasir_platform.cli.sim.read import read_request
from kvasir_platform.sim.server.setting import SimulatedPool

SHORT = "chat:rate=8,duration=10"


def run(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["sim", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["sim", *options]) == 2
    return capsys.readouterr().err


def test_a_run_has_percentiles_goodput_utilization_hits_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--workers", "2", "--workload", SHORT)
    assert found["format"] == "kvasir-sim/1"
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"]
    assert 0 < found["itl_s"]["p50"] < found["e2e_s"]["p50"]
    assert found["goodput"] == pytest.approx(found["requests"] / 10, rel=0.1)
    assert 0 < found["utilization"] <= 1
    assert 0.5 < found["hit_rate"] <= 1
    assert found["dollars"] == pytest.approx(2 * 2.99 * found["virtual_s"] / 3600)


def test_the_terminal_shows_the_same_figures_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--workload", SHORT)
    assert main(["sim", "--workload", SHORT]) == 0
    text = capsys.readouterr().out
    assert f"{found['requests']} requests" in text
    assert f"goodput {found['goodput']:.2f} requests/s" in text
    assert "llama-3.1-8b on 4 x both (1 x H100)" in text


def test_a_seed_determines_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def figures(seed: str) -> dict[str, Any]:
        found = run(capsys, "--workload", SHORT, "--seed", seed, "--prefill", "1", "--decode", "1")
        del found["times_real_time"]
        return found

    assert figures("1") == figures("1")
    assert figures("1") != figures("2")


@pytest.mark.parametrize(
    "options",
    [
        ("--batching", "static", "--batch", "8"),
        ("--no-chunked-prefill",),
        ("--no-prefix-cache",),
        ("--preemption", "swap", "--gpu", "L4", "--quantization", "fp8"),
        ("--speculate", "3", "--draft-cost", "0.05"),
        ("--tp", "8", "--model", "llama-3.1-70b"),
        ("--cpu-kv-gib", "100", "--kv-dtype", "fp8"),
        ("--workers", "1", "--autoscale", "1:3", "--start-s", "2"),
        ("--faults", "crash@3:0:2,slow@5:1", "--faults", "drain@6"),
        ("--policy", "round_robin", "--no-admission"),
        ("--prefill", "1", "--decode", "1", "--workers", "1"),
        ("--workload", "embeddings:rate=20,duration=5", "--model", "llama-3.1-8b"),
    ],
)
def test_every_option_is_simulated(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    given = options if "--workload" in options else (*options, "--workload", SHORT)
    found = run(capsys, *given)
    assert found["met_slo"] > 0
    assert found["e2e_s"]["p99"] is not None


def test_options_change_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    base = run(capsys, "--workload", SHORT)
    assert run(capsys, "--workload", SHORT, "--no-prefix-cache")["hit_rate"] == 0
    assert run(capsys, "--workload", SHORT, "--speculate", "4")["itl_s"]["p50"] < base["itl_s"]["p50"]
    assert run(capsys, "--workload", SHORT, "--tp", "4")["itl_s"]["p50"] < base["itl_s"]["p50"]
    assert run(capsys, "--workload", SHORT, "--faults", "crash@5:0:2")["failovers"] > 0


def test_pools_settings_and_slo_come_from_a_kvasir_yaml(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(
        "model: {source: kvasir-tiny}\n"
        "slo: [{name: fast, ttft_s: 0.5, itl_s: 0.02}]\n"
        "routing: {policy: least_loaded}\n"
        "pools:\n"
        "  - {name: compute, role: prefill, replicas: 2}\n"
        "  - {name: generate, role: decode, replicas: 3}\n"
    )
    found = run(capsys, "-f", str(spec), "--model", "qwen3-8b", "--workload", SHORT)
    assert [each["pool"] for each in found["pools"]] == ["compute", "generate"]
    assert found["slo"] == {"ttft_s": 0.5, "itl_s": 0.02}
    assert "policy least_loaded" in found["about"]


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> Path:
    """The kvasir.yaml of the first plan."""
    assert main(["plan", "--rate", "10", *options, "--write", str(folder)]) == 0
    capsys.readouterr()
    return folder / "kvasir.yaml"


def test_a_written_plan_is_simulated_with_its_model_hardware_precision_and_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = planned(capsys, tmp_path, "llama-3.1-8b", "--gpus", "L40S", "--quantization", "fp8")
    found = run(capsys, "-f", str(spec), "--workload", SHORT)
    assert found["about"].startswith("llama-3.1-8b on 2 x serve (1 x L40S, fp8);")
    assert found["dollars"] == pytest.approx(2 * 0.86 * found["virtual_s"] / 3600)
    full = run(capsys, "-f", str(spec), "--quantization", "none", "--workload", SHORT)
    assert found["itl_s"]["p50"] < 0.7 * full["itl_s"]["p50"]


def test_prefill_and_decode_of_a_plan_run_on_their_own_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = planned(capsys, tmp_path, "llama-3.1-70b", "--gpus", "H100:8,L40S:64", "--mode", "disaggregated")
    found = run(capsys, "-f", str(spec), "--workload", SHORT)
    assert "5 x prefill (4 x L40S, TP 4), 1 x decode (4 x H100, TP 4)" in found["about"]
    hours = found["virtual_s"] / 3600
    assert found["dollars"] == pytest.approx((5 * 4 * 0.86 + 4 * 2.99) * hours, rel=0.01)
    alike = run(capsys, "-f", str(spec), "--gpu", "H100", "--workload", SHORT)
    assert "5 x prefill (4 x H100, TP 4), 1 x decode (4 x H100, TP 4)" in alike["about"]
    assert alike["ttft_s"]["p50"] < 0.6 * found["ttft_s"]["p50"]
    assert alike["itl_s"]["p50"] == pytest.approx(found["itl_s"]["p50"], rel=0.1)


def test_a_pool_without_gpus_runs_on_its_cores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = ("--rate", "0.01", "--prompt-tokens", "100", "--output-tokens", "50", "--slo", "ttft=60,itl=1")
    spec = planned(capsys, tmp_path, "llama-3.1-8b", "--gpus", "CPU", *load)
    workload = ("--workload", "chat:rate=0.05,duration=60")
    found = run(capsys, "-f", str(spec), *workload)
    assert "1 x serve (8 cores)" in found["about"]
    more = run(capsys, "-f", str(spec), "--gpu", "CPU:32", *workload)
    assert "1 x serve (32 cores)" in more["about"]
    assert more["itl_s"]["p50"] < 0.5 * found["itl_s"]["p50"]


def test_options_come_before_the_spec_and_the_spec_before_defaults(tmp_path: Path) -> None:
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(
        "model: {source: llama-3.1-8b}\n"
        "disaggregation: never\n"
        "tiers: {cpu: {bytes: 20000000000}}\n"
        "cost: {prices: {L4: 7}}\n"
        "pools: [{name: serve, role: both, replicas: 2, gpu: L4, engine: {block_size: 16, kv_dtype: fp8}}]\n"
    )
    args = argparse.ArgumentParser()
    add_sim_options(args)

    def pool(*options: str) -> SimulatedPool:
        given = args.parse_args(["-f", str(spec), "--workload", SHORT, *options])
        settle(given)
        (found,) = read_request(given).setting.pools
        return found

    stated, other = pool(), pool("--gpu", "L40S", "--block", "64", "--cpu-kv-gib", "0", "--workers", "3")
    memory = stated.replica.memory
    assert (stated.replica.model.device.name, memory.block_tokens, stated.replicas) == ("L4", 16, 2)
    assert memory.cpu_blocks * 16 * stated.replica.kv_token_bytes == pytest.approx(20e9, rel=0.001)
    assert stated.dollars_per_hour == 7
    memory = other.replica.memory
    assert (other.replica.model.device.name, memory.block_tokens, other.replicas) == ("L40S", 64, 3)
    assert memory.cpu_blocks == 0
    assert other.dollars_per_hour == 0.86


def test_what_a_spec_leaves_open_or_no_run_plays_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(
        "model: {source: llama-3.1-8b, max_model_len: 1024}\n"
        "lora: [{name: law, path: /adapters/law}]\n"
        "tiers: {disk: {path: /cache}}\n"
        "cost: {currency: EUR, prices: {H100: 3}}\n"
    )
    assert main(["sim", "-f", str(spec), "--workload", SHORT]) == 0
    said = capsys.readouterr()
    assert "names no gpu for prefill, decode: H100 is assumed" in said.out
    assert f"not simulated of {spec}: lora, tiers.disk, model.max_model_len 1024" in said.err
    assert "cost.prices, which are in EUR (costs are at list prices, in USD)" in said.err


def test_a_recording_is_simulated_at_another_speed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recording = tmp_path / "traffic.jsonl"
    lines: list[dict[str, object]] = [{"format": "kvasir-workload/1", "block_tokens": 32}]
    lines += [
        {"arrival_s": i, "prompt_tokens": 320, "output_tokens": 20, "prefix_hashes": list(range(1, 9))}
        for i in range(20)
    ]
    recording.write_text("".join(json.dumps(each) + "\n" for each in lines))
    slow = run(capsys, "--workload", str(recording), "--workers", "1")
    fast = run(capsys, "--workload", f"{recording}:speed=4", "--workers", "1", "--policy", "round_robin")
    assert slow["requests"] == fast["requests"] == 20
    assert slow["hit_rate"] > 0.9
    assert fast["virtual_s"] < slow["virtual_s"] / 3


def test_compare_ranks_policies_as_parts_of_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    workload = "rag:rate=20,duration=4,prefixes=40"
    found = run(capsys, "compare", "--policies", "cost,round_robin", "--workload", workload, "--workers", "2")
    assert "; policies cost,round_robin; SLO: " in found["about"]
    assert found["bound"]["requests_per_s"] > 0
    assert all(0 < each["of_bound"] < 1 for each in found["policies"])
    goodputs = [each["goodput"] for each in found["policies"]]
    assert goodputs == sorted(goodputs, reverse=True)


def test_compare_lets_the_planner_size_pools_and_bounds_the_largest_fleet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ("--workload", "synthetic:rate=2,duration=60", "--slo", "ttft=2,itl=0.1", "--batch", "16")
    options = (
        "compare",
        "--policies",
        "round_robin",
        "--workers",
        "1",
        "--gpu",
        "L4",
        "--quantization",
        "fp8",
    )
    fixed = run(capsys, *options, *load)
    sized = run(capsys, *options, *load, "--autoscale", "1:3", "--start-s", "1")
    assert sized["bound"]["requests_per_s"] == pytest.approx(3 * fixed["bound"]["requests_per_s"])
    assert sized["policies"][0]["goodput"] > 1.3 * fixed["policies"][0]["goodput"]


@pytest.mark.parametrize(
    ("action", "options"),
    [
        ("run", {"--policies": "cost", "--attained": "0.9"}),
        ("compare", {"--policy": "round_robin"}),
        (
            "showcase",
            {
                "--png": "times.png",
                "--seed": "1",
                "--profile": "measured.json",
                "--model": "qwen3-8b",
                "--workload": SHORT,
                "--faults": "crash@3",
                "--file": "kvasir.yaml",
                "--no-admission": "",
            },
        ),
    ],
)
def test_an_action_refuses_options_that_have_no_effect_on_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    options: dict[str, str],
) -> None:
    def begun(*_: object) -> NoReturn:
        raise ConfigError("the action has begun")

    monkeypatch.setattr("kvasir_platform.cli.sim.command.read_request", begun)
    monkeypatch.setattr("kvasir_platform.cli.showcase.command.run_all", begun)
    for option, value in options.items():
        error = refused(capsys, action, option, *filter(None, [value]))
        assert f"{option} has no effect on {action}: leave it out; it belongs to `kvasir sim " in error


def test_help_names_the_actions_of_options_that_few_take(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sim", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "the routing policy (cost) [run]" in text
    assert "to rank (all) [compare]" in text
    assert "a page of the results [run, compare, showcase]" in text


def test_what_cannot_be_simulated_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a larger --tp" in refused(capsys, "--model", "llama-3.1-70b")
    assert "catalogue: GB200" in refused(capsys, "--gpu", "H9000")
    assert "go together" in refused(capsys, "--prefill", "2")
    assert "KIND crash, slow or drain" in refused(capsys, "--faults", "melt@3")
    assert "none of cost" in refused(capsys, "compare", "--policies", "best")
    assert "no preset" in refused(capsys, "--workload", "nonsense")
    assert "known without a network" in refused(capsys, "--model", "/no/such/folder")
    assert "number of cores of a worker" in refused(capsys, "--gpu", "CPU:many")
    assert "more cores, as --gpu CPU:16" in refused(capsys, "--gpu", "CPU:1")
    assert "set --tp 1" in refused(capsys, "--gpu", "CPU:64", "--tp", "2")
    assert "choose others with --autoscale" in refused(capsys, "--workers", "5", "--autoscale", "1:3")
    assert "`kvasir plan bge-m3` sizes pools" in refused(
        capsys, "--model", "bge-m3", "--workload", "embeddings:rate=20,duration=5"
    )


def test_the_times_are_drawn_as_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "times.png"
    assert main(["sim", "--workload", SHORT, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_draws_the_times_of_each_policy_as_a_png(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "policies.png"
    options = ("--policies", "cost,round_robin", "--workers", "1", "--workload", "rag:rate=20,duration=4")
    assert main(["sim", "compare", *options, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"chart: {picture}" in capsys.readouterr().out
