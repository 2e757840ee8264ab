"""The memory that vLLM reserves for LoRA adapters when it starts: slots of the largest rank.

A slot has two matrices for each linear layer of the language model, whether an adapter adapts it or not: A
from the inputs to the rank, B from the rank to the outputs. Tensor parallelism divides one of the two as it
divides the layer, and every rank holds the other (`BaseLinearLayerWithLoRA.create_lora_weights`). Each expert
has both (`FusedMoEWithLoRA`), and in some architectures embedding and head do, undivided.
tests/contract/test_adapters_against_vllm.py compares with vLLM's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.sizing.dimensions import Dimensions, dimensions
from kvasir.sizing.shape import EngineShape, element_bytes, stages
from kvasir.sizing.weights import WeightKind, WeightPart, rank_share, stage_of

ADAPTED_EMBEDDINGS = frozenset(
    (
        "ApertusForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "DeciLMForCausalLM",
        "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "ExaoneForCausalLM", "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM", "FalconH1ForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM",
        "GraniteSWAForCausalLM", "HyperCLOVAXForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM",
        "JambaForCausalLM", "K2HorizonForCausalLM", "LLaMAForCausalLM", "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM", "MiniCPM3ForCausalLM",
        "MiniCPMForCausalLM", "MixtralForCausalLM",
        "NemotronForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "Param2MoEForCausalLM",
        "Phi3ForCausalLM", "PhiMoEForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
        "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "SolarForCausalLM", "TeleChat2ForCausalLM",
        "TeleChat3ForCausalLM", "TeleFLMForCausalLM",
    )
)  # fmt: skip
"""Architectures of text generation whose classes in vLLM have `embedding_modules`: embedding and head."""
WITHOUT_HEADS = frozenset(("Cohere2ForCausalLM", "CohereForCausalLM"))
"""Those of them whose heads cannot be adapted."""
_FUSED_GATES = frozenset(("GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration"))
"""Architectures whose experts have one matrix A for gate and up (`is_3d_moe_weight`)."""


def adapter_bytes(config: ModelConfig, parts: Sequence[WeightPart], shape: EngineShape) -> tuple[int, ...]:
    """Return the bytes of all slots on a rank of each pipeline stage, 0 without adapters."""
    if not shape.adapters:
        return (0,) * shape.pipeline
    sizes = dimensions(config)
    divided = stages(sizes.layers, shape.pipeline)
    held = [0] * shape.pipeline
    for part in parts:
        if part.kind not in (WeightKind.EXPERT, WeightKind.EMBEDDING, WeightKind.HEAD):
            share = rank_share(part.kind, sizes, shape)
            held[stage_of(part, divided)] += math.ceil(part.whole_sizes + part.divided_sizes * share)
    # A checkpoint can have the experts of a layer in several tensors.
    routed = {part.layer: part for part in parts if part.kind is WeightKind.EXPERT}
    for part in routed.values():
        held[stage_of(part, divided)] += _expert_sizes(config, sizes, shape)
    if not ADAPTED_EMBEDDINGS.isdisjoint(config.architectures):
        held[0] += sizes.vocabulary + sizes.hidden
        if WITHOUT_HEADS.isdisjoint(config.architectures):
            held[-1] += sizes.vocabulary + sizes.hidden
    slot = shape.adapters * shape.adapter_rank * element_bytes(shape.dtype)
    return tuple(size * slot for size in held)


def adapter_copy_bytes(config: ModelConfig, parts: Sequence[WeightPart], shape: EngineShape) -> int:
    """Return the host memory of a rank for the adapters that it holds: beside its part of each slot, vLLM
    keeps every adapter whole (`max_cpu_loras`), on a GPU too."""
    whole = replace(shape, tensor=1, pipeline=1, data=1, expert_parallel=False, redundant_experts=0)
    return sum(adapter_bytes(config, parts, whole))


def _expert_sizes(config: ModelConfig, sizes: Dimensions, shape: EngineShape) -> int:
    """Return the inputs and outputs of all experts of a layer on one rank."""
    ranks = shape.tensor * shape.data
    local, width = sizes.experts, sizes.expert_size
    if shape.expert_parallel:
        local = -(-(sizes.experts + shape.redundant_experts) // ranks)
    else:
        width = -(-width // ranks)
    gates = 1 if not _FUSED_GATES.isdisjoint(config.architectures) else 2
    return local * ((gates + 1) * sizes.hidden + 3 * width)
