"""The memory of LoRA adapters, which engines reserve when they start."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.checkpoint.tensors import TensorHeader
from kvasir.config.load.loader import load
from kvasir.hardware.gpus import gpu_named
from kvasir.sizing.adapters import adapter_bytes
from kvasir.sizing.fit import ModelFiles, RankMemory, fit, model_files, need_of
from kvasir.sizing.matrices import linear_sizes
from kvasir.sizing.pools import shape_of
from kvasir.sizing.remedies import Attempt, remedies
from kvasir.sizing.report import describe
from kvasir.sizing.shape import EngineShape
from kvasir_platform.cluster.preflight.footprint import replica_bytes
from kvasir_platform.cluster.preflight.machine_facts import ModelProbe

HIDDEN, MLP, KV, VOCABULARY = 4096, 14336, 1024, 128256
INPUTS = 3 * HIDDEN + HIDDEN + 2 * HIDDEN
"""Of q, k and v, of o, and of gate and up; the inputs of down are MLP."""


def files(values: dict[str, Any]) -> ModelFiles:
    return model_files(models.config_of(values), models.tensors_of(values))


def slots(values: dict[str, Any], **shape: Any) -> tuple[int, ...]:
    found = files(values)
    return adapter_bytes(found.config, found.weights, EngineShape(**shape))


def test_a_slot_has_two_matrices_of_its_rank_for_each_linear_layer() -> None:
    outputs = HIDDEN + 2 * KV + HIDDEN + 2 * MLP + HIDDEN
    layer = INPUTS + MLP + outputs
    embeddings = 2 * (VOCABULARY + HIDDEN)
    (held,) = slots(models.LLAMA_8B, adapters=3, adapter_rank=64)
    assert held == 3 * 64 * 2 * (32 * layer + embeddings)
    assert slots(models.LLAMA_8B) == (0,)


def test_tensor_parallelism_divides_one_matrix_of_each_layer() -> None:
    each = HIDDEN // 4 + 2 * KV // 4 + 2 * MLP // 4  # the outputs of q, k, v, gate and up
    layer = INPUTS - HIDDEN + HIDDEN // 4 + MLP // 4 + each + 2 * HIDDEN
    (held,) = slots(models.LLAMA_8B, adapters=1, adapter_rank=8, tensor=4)
    assert held == 8 * 2 * (32 * layer + 2 * (VOCABULARY + HIDDEN))


@pytest.mark.parametrize("gpus", [0, 2])
def test_adapters_loaded_at_run_time_take_host_memory_whole_on_every_rank(gpus: int) -> None:
    found = files(models.LLAMA_8B)
    model = ModelProbe(config=found.config, weights=found.weights)

    def host_bytes(*options: str) -> int:
        layout = [f"pools.prefill.gpus={gpus}", "pools.prefill.engine.tensor_parallel_size=2"]
        deployment = load(None, [*layout, *options])
        return replica_bytes(deployment, deployment.pools[0], model)

    loading = "lora_loading={allow: [/adapters], max_adapters: 3, max_rank: 64}"
    (copies,) = slots(models.LLAMA_8B, adapters=3, adapter_rank=64)
    (part,) = slots(models.LLAMA_8B, adapters=3, adapter_rank=64, tensor=2)
    # The slots of a GPU are in its memory.
    assert host_bytes(loading) - host_bytes() == 2 * (copies + (0 if gpus else part))


def test_embedding_and_head_are_on_the_first_and_last_stage() -> None:
    first, middle, last = slots(
        models.LLAMA_8B | {"num_hidden_layers": 30}, adapters=1, adapter_rank=1, pipeline=3
    )
    assert first == last == middle + 2 * (VOCABULARY + HIDDEN)


def test_each_expert_has_matrices_of_its_own() -> None:
    (held,) = slots(models.QWEN3_30B, adapters=1, adapter_rank=16)
    experts = 48 * 128 * 16 * 2 * (3 * 2048 + 3 * 768)
    assert experts < held < 1.1 * experts
    (half,) = slots(models.QWEN3_30B, adapters=1, adapter_rank=16, tensor=2, expert_parallel=True)
    assert experts / 2 < half < 1.1 * experts / 2


@pytest.mark.parametrize(
    ("name", "shape", "quantization"),
    [
        ("q_proj.weight", (512, 256), None),
        ("q_proj.qweight", (256, 64), {"quant_method": "awq", "bits": 4}),
        ("q_proj.qweight", (32, 512), {"quant_method": "gptq", "bits": 4}),
        ("q_proj.qweight", (64, 512), {"quant_method": "gptq", "bits": 8}),
        ("q_proj.weight_packed", (512, 32), {"config_groups": {"0": {"weights": {"num_bits": 4}}}}),
    ],
)
def test_packed_weights_count_as_what_they_hold(
    name: str, shape: tuple[int, ...], quantization: dict[str, Any] | None
) -> None:
    tensor = TensorHeader(f"model.layers.0.self_attn.{name}", "I32", shape, 0, "model.safetensors")
    assert linear_sizes(tensor, quantization) == (256, 512)


@pytest.mark.parametrize("name", ["self_attn.q_proj.scales", "input_layernorm.weight", "mixer.conv1d.weight"])
def test_what_is_no_linear_layer_is_not_adapted(name: str) -> None:
    tensor = TensorHeader(f"model.layers.0.{name}", "F16", (4, 64), 0, "model.safetensors")
    assert linear_sizes(tensor, None) == (0, 0)


def test_the_arithmetic_of_a_fit_has_the_adapters_and_says_how_many_would_fit() -> None:
    found = files(models.LLAMA_8B)
    gpu = gpu_named("L4")
    assert gpu is not None
    shape = EngineShape(adapters=16, adapter_rank=64)
    memory = RankMemory(gpu.memory_bytes, 0.9)
    need = need_of(found, shape)
    whole = fit(need, memory)
    assert whole.missing
    assert "LoRA adapters" in describe(whole, need, gpu.name)
    without = need_of(found, EngineShape())
    assert "LoRA" not in describe(fit(without, memory), without, gpu.name)
    fewer = [each for each in remedies(Attempt(found, shape, memory, gpu, 1.0)) if "LoRA" in each]
    assert fewer
    assert fewer[0].startswith("serve at most ")


def test_the_slots_are_those_of_the_spec() -> None:
    named = "lora=[{name: a, path: /a, rank: 8}, {name: b, path: /b, rank: 20}]"
    loaded = "lora_loading={allow: [/adapters], max_adapters: 6, max_rank: 100}"
    for options, expected in (([], (0, 0)), ([named], (2, 32)), ([named, loaded], (8, 128))):
        view = load(None, options).view_of("decode")
        shape = shape_of(view, view.pool("decode"), max_model_len=4096)
        assert (shape.adapters, shape.adapter_rank) == expected
