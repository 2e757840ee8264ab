"""The architectures of which tiny models are made, as configurations of transformers.

Hidden size 256, four layers, the tokens of kvasir-tiny; head sizes are those of vLLM's CPU kernels. Windows
and chunks are far shorter than the prompts of the benchmark, so that layers leave tokens behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.kit.models.tiny_tokens import VOCABULARY

Kind = Literal["generates", "embeds", "classifies"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 6,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_WINDOW = 256
_INTERLEAVED = ["sliding_attention", "full_attention"] * 2
_MIXED = ["sliding_attention"] * 3 + ["full_attention"]
_NO_EXPERT_ADAPTERS = "vLLM's LoRA kernels of mixtures of experts need Triton, and with it a GPU"
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One model to make: `config` names a configuration class of transformers and `architecture` its model
    class, `fields` are what differs from the common ones, where None removes one. `adapts` names the Linear
    layers of a LoRA adapter, () for no adapter. `quantization` is how the weights of Linear layers are
    stored; `half` is for models that vLLM runs in bfloat16 only, `template` is False for no chat template.
    `recurrent` is for models with a recurrent state: with its prefix cache vLLM divides their prompts at the
    ends of blocks, which changes roundings, so that tokens are compared with the cache on. `block` is what
    vLLM makes of a block of 32 tokens, in tokens. `remark` explains results that are vLLM's own."""

    name: str
    config: str
    architecture: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "generates"
    adapts: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj")
    quantization: Literal["", "awq", "gptq", "w4a16", "fp8", "int8"] = ""
    template: bool = True
    half: bool = False
    recurrent: bool = False
    block: int = 32
    remark: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """All fields of the configuration."""
        merged = {**_COMMON, **self.fields}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """The dtype to serve it in: 32 bits where kernels exist, so that tokens can be compared."""
        return "bfloat16" if self.quantization or self.half else "float32"


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    # As in DeepSeek's checkpoints. vLLM's CPU kernel for RoPE that is not scaled is wrong for MLA's tensors.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
}
_NEXT: dict[str, Any] = {
    **_MOE,
    "head_dim": 64,
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 256,
}
_ENCODER: dict[str, Any] = {"num_key_value_heads": None, "max_position_embeddings": 512}

MODELS: tuple[TinyModel, ...] = (
    TinyModel("llama", "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE}),
    TinyModel("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    TinyModel("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    TinyModel(
        "qwen3-moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_MOE, "head_dim": 32},
        adapts=(),
        remark=_NO_EXPERT_ADAPTERS,
    ),
    TinyModel(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4},
        adapts=(),
        remark=_NO_EXPERT_ADAPTERS,
    ),
    TinyModel("phi3", "Phi3Config", "Phi3ForCausalLM", adapts=("self_attn.o_proj",)),
    TinyModel(
        "mistral-sliding",
        "MistralConfig",
        "MistralForCausalLM",
        {"sliding_window": _WINDOW},
        remark="of KV that is received, vLLM keeps the blocks of the window only, and of an equal prompt it "
        "computes the last token at least, before which a window must be whole: a prompt that ends with a "
        "block (1,600 tokens) is therefore not found again in the decode engine, and comes from the prefill "
        "engine's cache once more",
    ),
    TinyModel(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": _WINDOW,
            "layer_types": _INTERLEAVED,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": _WINDOW, "layer_types": _MIXED},
    ),
    TinyModel(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
        adapts=(),
    ),
    TinyModel(
        "cohere2",
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": _WINDOW, "layer_types": _MIXED, "tie_word_embeddings": True},
    ),
    TinyModel(
        "llama4",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "head_dim": 32,
            "attention_chunk_size": _WINDOW,
            "num_local_experts": 4,
            "intermediate_size_mlp": 512,
        },
        adapts=(),
    ),
    TinyModel(
        "deepseek-v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _MLA,
        adapts=(),
        remark="vLLM has no prefix cache for MLA on CPUs without AMX, so that no prompt is found again",
    ),
    TinyModel(
        "qwen3-next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _NEXT,
        adapts=(),
        half=True,
        recurrent=True,
        block=288,
        remark="in bfloat16, since vLLM's CPU kernels of gated delta nets take nothing else, and compared "
        "with vLLM alone with its prefix cache, which divides prompts at the ends of blocks of 288 tokens: "
        "without it, vLLM alone has other tokens after 3 of the 10 prompts (log-probabilities within 0.068)",
    ),
    TinyModel(
        "lfm2",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "block_multiple_of": 64,
            # In the checkpoints that vLLM reads, and not in the class of configurations.
            "conv_dim": 256,
            "block_dim": 256,
        },
        adapts=(),
        remark="with a prefix cache, vLLM alone has other tokens on CPUs than without, far beyond "
        "roundings: workers on CPUs serve this model without one, so that no prompt is found again",
    ),
    TinyModel(
        "granite-hybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _GRANITE_HYBRID,
        adapts=(),
        remark="vLLM keeps no states of Mamba-2 layers for a prefix cache on CPUs, so that no prompt is "
        "found again",
    ),
    TinyModel("granite", "GraniteConfig", "GraniteForCausalLM"),
    TinyModel(
        "olmoe", "OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2}, adapts=()
    ),
    TinyModel(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        {"multi_query": True, "new_decoder_architecture": False, "num_key_value_heads": None},
        adapts=(),
    ),
    TinyModel(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"num_key_value_heads": None, "intermediate_size": None, "tie_word_embeddings": True},
        adapts=(),
    ),
    TinyModel("llama-no-template", "LlamaConfig", "LlamaForCausalLM", adapts=(), template=False),
    TinyModel("llama-awq", "LlamaConfig", "LlamaForCausalLM", adapts=(), quantization="awq"),
    TinyModel("llama-gptq", "LlamaConfig", "LlamaForCausalLM", adapts=(), quantization="gptq"),
    TinyModel("llama-w4a16", "LlamaConfig", "LlamaForCausalLM", adapts=(), quantization="w4a16"),
    TinyModel("llama-fp8", "LlamaConfig", "LlamaForCausalLM", adapts=(), quantization="fp8"),
    TinyModel("llama-int8", "LlamaConfig", "LlamaForCausalLM", adapts=(), quantization="int8"),
    TinyModel("bert", "BertConfig", "BertModel", _ENCODER, kind="embeds", adapts=()),
    TinyModel(
        "qwen3-embedding", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}, kind="embeds", adapts=()
    ),
    TinyModel(
        "bert-reranker",
        "BertConfig",
        "BertForSequenceClassification",
        {**_ENCODER, "num_labels": 1},
        kind="classifies",
        adapts=(),
    ),
    TinyModel(
        "qwen3-reranker",
        "Qwen3Config",
        "Qwen3ForSequenceClassification",
        {"head_dim": 32, "num_labels": 1, "use_sep_token": False},
        kind="classifies",
        adapts=(),
    ),
    TinyModel(
        "modernbert-classes",
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {**_ENCODER, "num_labels": 3, "cls_token_id": 0, "sep_token_id": 6},
        kind="classifies",
        adapts=(),
    ),
)


def named(name: str) -> TinyModel:
    """Return the model of that name. Raises KeyError."""
    return {model.name: model for model in MODELS}[name]
