"""A profile of `kvasir calibrate` takes the place of data-sheet coefficients on its own hardware."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from kvasir.performance.profile import (
    FORMAT,
    CalibratedProfile,
    EngineProfile,
    ProfileResidual,
    encode_profile,
)
from kvasir_platform.cli.main import main


def data(*arguments: str) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as out:
        assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def refused(*arguments: str) -> str:
    with redirect_stderr(StringIO()) as err:
        assert main(["plan", *arguments]) == 2
    return err.getvalue()


def profile(folder: Path, device: str, transfer: tuple[float, float] = (0.0, 0.0)) -> Path:
    """A profile of an engine on this device, a tenth as fast as data sheets have it, with this transfer."""
    engine = EngineProfile(
        pool="serve",
        role="both",
        device=device,
        devices=1,
        parameters=8_030_000_000,
        model_bytes=16_060_000_000,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        coefficients={"arithmetic": 0.05, "attention": 0.035, "bandwidth": 0.07},
        residuals=(ProfileResidual("decode", 0.08, 40),),
    )
    made = CalibratedProfile(FORMAT, "llama-3.1-8b", "2026-11-25", {}, (engine,), *transfer)
    path = folder / "profile.json"
    path.write_bytes(encode_profile(made))
    return path


SLO = ("--slo", "ttft=20,itl=0.5")


def test_measured_hardware_has_its_own_coefficients_and_others_keep_those_of_the_data_sheet(
    tmp_path: Path,
) -> None:
    path = str(profile(tmp_path, "NVIDIA H100 80GB HBM3"))
    usual, slow = (
        data("llama-3.1-8b", "--gpus", "H100", *SLO, *more)["plans"][0] for more in ((), ("--profile", path))
    )
    assert slow["itl_s"]["value"] > 3 * usual["itl_s"]["value"]
    assert slow["pools"][0]["coefficients"] == "profile of 2026-11-25"
    other = data("llama-3.1-8b", "--gpus", "H100,L40S", *SLO, "--profile", path)
    sources = {pool["hardware"]: pool["coefficients"] for plan in other["plans"] for pool in plan["pools"]}
    assert sources["L40S"] == "data sheet"


def test_error_bars_of_a_profile_are_the_errors_of_its_fit(tmp_path: Path) -> None:
    path = str(profile(tmp_path, "NVIDIA H100 80GB HBM3"))
    bars = data("llama-3.1-8b", "--gpus", "H100", *SLO, "--mode", "aggregated", "--profile", path)
    ttft = bars["plans"][0]["ttft_s"]
    assert 1.0 < ttft["high"] / ttft["value"] < 1.3
    assert 1.0 < ttft["value"] / ttft["low"] < 1.3


def test_a_profile_of_other_hardware_is_refused(tmp_path: Path) -> None:
    path = str(profile(tmp_path, "NVIDIA L4"))
    assert "was made on L4" in refused("llama-3.1-8b", "--gpus", "H100", "--profile", path)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused("llama-3.1-8b", "--profile", str(tmp_path / "none.json"))
    path = tmp_path / "profile.json"
    path.write_text("{}")
    assert "is no profile" in refused("llama-3.1-8b", "--profile", str(path))
    path.write_bytes(b" " * ((1 << 20) + 1))
    assert "over 1024 KiB" in refused("llama-3.1-8b", "--profile", str(path))


def test_a_profile_of_a_cpu_counts_its_engines(tmp_path: Path) -> None:
    path = str(profile(tmp_path, "AMD EPYC"))
    found = data("kvasir-tiny", "--gpus", "CPU:4", "--prompt-tokens", "100", *SLO, "--profile", path)
    assert "CPU engine" in found["plans"][0]["title"]
    assert found["plans"][0]["dollars_per_hour"] is None
    assert not any("$" in each["reason"] for each in found["optimisations"])
    assert found["coefficients"] == ["CPU profile of 2026-11-25"]


def test_a_simulation_takes_the_times_of_the_profile(tmp_path: Path) -> None:
    path = str(profile(tmp_path, "NVIDIA H100 80GB HBM3"))
    times = []
    for more in ((), ("--profile", path)):
        with redirect_stdout(StringIO()) as out:
            assert main(["sim", "--workload", "chat:rate=1,duration=10", "--json", *more]) == 0
        times.append(json.loads(out.getvalue()))
    usual, slow = times
    assert slow["tpot_s"]["p50"] > 3 * usual["tpot_s"]["p50"]
    assert "profile of 2026-11-25" in slow["about"]


def test_a_plan_and_a_simulation_of_pools_apart_take_the_transfer_of_the_profile(tmp_path: Path) -> None:
    device, load = "NVIDIA H100 80GB HBM3", ("--rate", "0.2", "--prompt-tokens", "1000", *SLO)
    planned, simulated = [], []
    for transfer in ((0.0, 0.0), (1.5, 1e-9)):
        path = str(profile(tmp_path, device, transfer))
        plan = ("llama-3.1-8b", "--gpus", "H100", "--mode", "disaggregated", *load, "--profile", path)
        planned.append(data(*plan)["plans"][0]["ttft_s"]["value"])
        with redirect_stdout(StringIO()) as out:
            workload = "synthetic:rate=0.2,duration=30,prompt=1000,output=20"
            pools = ("--prefill", "1", "--decode", "1", "--profile", path)
            assert main(["sim", "--workload", workload, *pools, "--json"]) == 0
        simulated.append(json.loads(out.getvalue())["ttft_s"]["p50"])
    assert planned[1] - planned[0] > 1.4
    assert 1.4 < simulated[1] - simulated[0] < 1.8


def test_a_profile_of_a_cpu_is_simulated_on_its_own_cores(tmp_path: Path) -> None:
    path = str(profile(tmp_path, "AMD EPYC"))
    options = ("--model", "kvasir-tiny", "--workload", "chat:rate=1,duration=5", "--profile", path)
    with redirect_stdout(StringIO()) as out:
        assert main(["sim", *options, "--gpu", "CPU", "--json"]) == 0
    about = json.loads(out.getvalue())["about"]
    assert "(1 CPU engine)" in about
    assert "profile of 2026-11-25" in about
    with redirect_stderr(StringIO()) as err:
        assert main(["sim", *options, "--gpu", "CPU:4"]) == 2
        assert main(["sim", *options]) == 2
    assert "write --gpu CPU" in err.getvalue()
    assert "was made on CPU; choose that hardware" in err.getvalue()
