"""`kvasir check --fit`: whether models fit on GPUs that are elsewhere, and nothing of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.kit import public_models as models
from tests.kit.model_folder import write_model

from kvasir.config.load.loader import loads
from kvasir.sizing.weights import weight_parts
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.gpu_memory import fit_findings
from kvasir_platform.cluster.preflight.machine_facts import ModelProbe, ProbedModels
from kvasir_platform.cluster.preflight.probe import probe_models

ONE_POOL = "model: {source: %s}\ndisaggregation: never\npools: [{name: serve, role: both, gpus: 1}]\n"
IN_CLUSTER = "discovery: {kind: kubernetes}\n" + ONE_POOL


def run(folder: Path, *arguments: str, spec: str = ONE_POOL, values: Any = models.LLAMA_8B) -> int:
    """Run it on a model folder of these values."""
    tensors = models.tensors_of(values)
    source = write_model(folder / "llama", values, {each.name: (each.dtype, each.shape) for each in tensors})
    (folder / "k.yaml").write_text(spec % source)
    return main(["check", "--fit", f"--file={folder / 'k.yaml'}", *arguments])


def found(model: ModelProbe, spec: str = IN_CLUSTER) -> list[Finding]:
    deployment = loads(spec % "owner/llama", "k.yaml")
    return fit_findings(deployment, ProbedModels({"llama": model}), lambda _pool: ["NVIDIA-H100-80GB-HBM3"])


CONFIG = models.config_of(models.LLAMA_8B)
ON_HUB = ModelProbe(
    folder="owner/llama",
    to_download=True,
    download_bytes=1 << 40,
    config=CONFIG,
    weight_bytes=1,
    weights=weight_parts(CONFIG, models.tensors_of(models.LLAMA_8B)),
    files=frozenset({"config.json", "tokenizer.json", "model.safetensors"}),
)


def test_a_model_that_fits_is_reported_with_the_tokens_of_kv_that_remain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--gpu=serve=NVIDIA-H100-80GB-HBM3") == 0
    shown = capsys.readouterr().out
    assert "pool serve: llama fits on H100: 71.2 GiB (0.9 of 79.1) = 15.0 weights" in shown
    assert "449,696 tokens" in shown
    assert shown.endswith("every model fits\n")


def test_the_smallest_of_several_gpus_counts_and_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpu=serve=NVIDIA-H100-80GB-HBM3", "--gpu=serve=Tesla-T4", "-o", "json"]
    assert run(tmp_path, *arguments) == 1
    shown = json.loads(capsys.readouterr().out)
    assert not shown["ok"]
    (refused,) = (each for each in shown["findings"] if each["level"] == "error")
    assert refused["message"].startswith("pool serve: llama does not fit on T4 by ")
    assert "or use " in refused["remedy"]


def test_a_part_of_a_gpu_is_not_taken_for_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--gpu=serve=NVIDIA-A100-SXM4-40GB-MIG-1g.5gb") == 0
    shown = capsys.readouterr().out
    assert "pool serve: llama needs 16.8 GiB of each GPU" in shown
    assert "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb is not known here" in shown
    assert shown.endswith("nothing is known that would keep it from starting\n")


def test_a_gpu_is_named_for_a_pool_of_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--gpu=other=H100") == 2
    assert "--gpu other: there is no such pool; there are serve" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, "--gpu=serve")
    assert "POOL=GPU" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["", "discovery: {kind: kubernetes}\n"])
def test_a_pool_that_leaves_its_gpus_open_has_one_for_each_rank_of_the_named_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    left_open = where + ONE_POOL.replace("gpus: 1", "engine: {tensor_parallel_size: 2}")
    assert run(tmp_path, "--gpu=serve=NVIDIA-H100-80GB-HBM3", spec=left_open) == 0
    assert "pool serve: llama fits on each of 2 H100" in capsys.readouterr().out
    assert run(tmp_path, spec=left_open) == 0
    assert capsys.readouterr().out == "no pool has a GPU\n"


def test_without_a_named_gpu_those_of_the_machine_are_counted_as_at_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = ("NVIDIA H100 80GB HBM3",)
    monkeypatch.setattr("kvasir_platform.cli.commands.check.gpu_devices", lambda _: h100)
    monkeypatch.setattr("kvasir_platform.cli.commands.check.installed_packages", lambda: {"vllm": "1"})
    assert run(tmp_path, spec="model: {source: %s}\n") == 0
    assert "pool serve: llama fits on H100" in capsys.readouterr().out
    assert run(tmp_path, spec="model: {source: %s}\ndisaggregation: always\n") == 0
    shared = capsys.readouterr().out
    assert "pool decode: llama fits on H100" in shared
    assert "given for KV" in shared
    assert shared.endswith("every model fits\n")


def test_a_gpu_is_named_for_no_other_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--gpu=decode=H100"]) == 2
    assert "--gpu is for --fit" in capsys.readouterr().err


def test_a_download_is_no_matter_of_the_machine_that_asks() -> None:
    """Its cache has no room for it, and workers have their own."""
    (finding,) = found(ON_HUB)
    assert (finding.level, finding.check) == ("ok", "memory")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"unknown": "the Hub does not answer: Timeout", "config": None}, "the Hub does not answer"),
        ({"weights": ()}, "the headers of its weights could not be read"),
        (
            {"weights": (), "weights_problem": "no weights", "files": frozenset({"tokenizer.json"})},
            "no weights",
        ),
    ],
)
def test_what_is_not_known_is_a_warning(change: Any, why: str) -> None:
    (finding,) = found(replace(ON_HUB, **change))
    assert finding.level == "warning"
    assert finding.message.startswith(f"whether llama fits is not known: {why}")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ModelProbe(problem="owner/llama is gated; accept its terms"), "owner/llama is gated"),
        (replace(ON_HUB, weights=(), weights_problem="model.safetensors is cut off"), "is cut off"),
        (replace(ON_HUB, files=frozenset({"tokenizer.model", "model.safetensors"})), "SentencePiece"),
    ],
)
def test_what_cannot_be_served_is_refused_as_by_any_check(model: ModelProbe, why: str) -> None:
    errors = [each for each in found(model) if each.level == "error"]
    assert any(why in each.message for each in errors)


def test_a_pool_without_gpus_is_not_looked_at() -> None:
    on_cpus = ONE_POOL.replace("gpus: 1", "gpus: 0")
    assert found(ModelProbe(problem="anything"), on_cpus) == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("/nowhere/llama", "there is no /nowhere/llama on this machine"),
        ("s3://b/llama", "runai-model-streamer"),
    ],
)
def test_a_model_that_this_machine_cannot_see_is_not_known(
    source: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("kvasir.config.load.object_storage.streamer_is_installed", lambda: False)
    (probe,) = probe_models(loads(ONE_POOL % source, "k.yaml")).by_name.values()
    assert why in probe.unknown
