"""Shapes of well-known models, so that a plan needs neither their files nor a network.

The values are those of the published config.json files, as far as memory and time depend on them; positions
that a model supports limit the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`source` is its Hugging Face id, and `values` its config.json."""

    source: str
    values: dict[str, Any]


_LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA_70B = _LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
_LLAMA_405B = _LLAMA_8B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
}  # fmt: skip
_LLAMA_2_7B = _LLAMA_8B | {
    "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
_MISTRAL_7B = _LLAMA_8B | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
    "vocab_size": 32768, "max_position_embeddings": 32768,
}  # fmt: skip
_MIXTRAL = _MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip
_QWEN3_8B = _LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "intermediate_size": 12288,
    "num_hidden_layers": 36, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
_QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "vocab_size": 151936, "max_position_embeddings": 40960, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 128,
    "num_experts_per_tok": 4, "num_hidden_layers": 36, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
_GPT_OSS_20B = _GPT_OSS_120B | {
    "num_local_experts": 32, "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_GEMMA3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_hidden_layers": 62, "sliding_window": 1024,
        "vocab_size": 262208, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
}  # fmt: skip
_BGE_M3: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 1024,
    "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 250002,
    "max_position_embeddings": 8194, "tie_word_embeddings": True, "torch_dtype": "float32",
    "position_embedding_type": "absolute", "pad_token_id": 1,
}  # fmt: skip

KNOWN_MODELS: dict[str, KnownModel] = {
    "llama-3.1-8b": KnownModel("meta-llama/Llama-3.1-8B-Instruct", _LLAMA_8B),
    "llama-3.1-70b": KnownModel("meta-llama/Llama-3.1-70B-Instruct", _LLAMA_70B),
    "llama-3.1-405b": KnownModel("meta-llama/Llama-3.1-405B-Instruct", _LLAMA_405B),
    "llama-2-7b": KnownModel("meta-llama/Llama-2-7b-chat-hf", _LLAMA_2_7B),
    "mistral-7b": KnownModel("mistralai/Mistral-7B-Instruct-v0.3", _MISTRAL_7B),
    "mixtral-8x7b": KnownModel("mistralai/Mixtral-8x7B-Instruct-v0.1", _MIXTRAL),
    "qwen3-8b": KnownModel("Qwen/Qwen3-8B", _QWEN3_8B),
    "qwen3-30b-a3b": KnownModel("Qwen/Qwen3-30B-A3B", _QWEN3_30B),
    "gpt-oss-20b": KnownModel("openai/gpt-oss-20b", _GPT_OSS_20B),
    "gpt-oss-120b": KnownModel("openai/gpt-oss-120b", _GPT_OSS_120B),
    "deepseek-v3": KnownModel("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3),
    "gemma-3-27b": KnownModel("google/gemma-3-27b-it", _GEMMA3_27B),
    "bge-m3": KnownModel("BAAI/bge-m3", _BGE_M3),
}
"""By the names that `kvasir plan` takes."""
