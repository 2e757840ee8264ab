"""Parameters, operations and bytes counted from config.json agree with what is published of the models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.performance.work import AttentionWork, ModelWork, model_work

_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
_FALCON_7B = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544,
    "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71, "multi_query": True,
    "new_decoder_architecture": False, "vocab_size": 65024,
}  # fmt: skip
_FALCON_40B = _FALCON_7B | {
    "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
_MAVERICK = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "head_dim": 128,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2, "num_attention_heads": 40,
        "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "vocab_size": 202048, "tie_word_embeddings": False,
    },
}  # fmt: skip
_JAMBA_MINI = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "num_experts": 16, "num_experts_per_tok": 2, "attn_layer_period": 8, "attn_layer_offset": 4,
    "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": 256, "vocab_size": 65536, "tie_word_embeddings": False,
}  # fmt: skip
_LFM2_1B = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048,
    "intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "conv_L_cache": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536,
}  # fmt: skip


def _work(values: dict[str, Any]) -> ModelWork:
    return model_work(models.config_of(values))


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        pytest.param(models.LLAMA_8B, 8.03, id="llama-8b"),
        pytest.param(models.LLAMA_70B, 70.55, id="llama-70b"),
        pytest.param(models.LLAMA_405B, 405.9, id="llama-405b"),
        pytest.param(models.QWEN3_8B, 8.19, id="qwen3-8b"),
        pytest.param(models.QWEN3_30B, 30.5, id="qwen3-30b"),
        pytest.param(models.DEEPSEEK_V3, 671.0, id="deepseek-v3"),
        pytest.param(models.GPT_OSS_120B, 116.8, id="gpt-oss-120b"),
        pytest.param(models.GEMMA3_27B, 27.0, id="gemma3-27b without its tower"),
        pytest.param(models.QWEN3_NEXT_80B, 80.0, id="qwen3-next-80b"),
        pytest.param(models.GRANITE4_SMALL, 32.0, id="granite4-small"),
        pytest.param(_GPT2, 0.124, id="gpt2"),
        pytest.param(_FALCON_7B, 6.92, id="falcon-7b"),
        pytest.param(_FALCON_40B, 41.3, id="falcon-40b"),
        pytest.param(_MAVERICK, 400.0, id="llama4-maverick"),
        pytest.param(_JAMBA_MINI, 51.6, id="jamba-mini"),
        pytest.param(_LFM2_1B, 1.17, id="lfm2-1.2b"),
    ],
)
def test_the_parameters_counted_are_those_published(values: dict[str, Any], billions: float) -> None:
    assert _work(values).parameters == pytest.approx(billions * 1e9, rel=0.015)


_IN_ELEMENTS = {"BF16": 2.0, "F8_E4M3": 1.0, "U8": 0.5}


@pytest.mark.parametrize(
    "values",
    [
        models.LLAMA_8B, models.LLAMA_70B, models.LLAMA_405B, models.QWEN3_8B, models.QWEN3_30B,
        models.DEEPSEEK_V3, models.GPT_OSS_120B, models.GEMMA3_27B,
    ],
    ids=lambda values: str(values["architectures"][0]) + str(values.get("num_hidden_layers", "")),
)  # fmt: skip
def test_the_parameters_counted_are_the_elements_of_the_checkpoint(values: dict[str, Any]) -> None:
    elements = sum(
        tensor.nbytes / _IN_ELEMENTS[tensor.dtype]
        for tensor in models.tensors_of(values)
        if "scale" not in tensor.name
    )
    assert _work(values).parameters == pytest.approx(elements, rel=0.001)


@pytest.mark.parametrize(
    ("values", "billions"),
    [(models.DEEPSEEK_V3, 37.0), (models.QWEN3_30B, 3.3), (models.GPT_OSS_120B, 5.1), (_MAVERICK, 17.0)],
    ids=["deepseek-v3", "qwen3-30b", "gpt-oss-120b", "llama4-maverick"],
)
def test_a_token_of_a_mixture_of_experts_uses_the_published_part(
    values: dict[str, Any], billions: float
) -> None:
    work = _work(values)
    assert work.active + work.head == pytest.approx(billions * 1e9, rel=0.08)


def test_a_tied_head_is_read_and_not_kept_twice() -> None:
    tied = _work(models.LLAMA_8B | {"tie_word_embeddings": True})
    separate = _work(models.LLAMA_8B)
    assert tied.embedding == 0.0
    assert tied.head == separate.head == 128256 * 4096
    assert tied.weights_read(1) == separate.weights_read(1)


def test_a_token_of_a_70b_model_with_grouped_queries_has_327_680_bytes_of_kv() -> None:
    assert 2 * _work(models.LLAMA_70B).kv_elements(1.0) == 327_680


def test_4_096_tokens_of_a_70b_model_take_1_34_gb_with_grouped_queries_and_10_74_gb_without() -> None:
    grouped = _work(models.LLAMA_70B)
    full = _work(models.LLAMA_70B | {"num_key_value_heads": 64})
    assert 2 * grouped.kv_elements(4096) / 1e9 == pytest.approx(1.34, abs=0.005)
    assert 2 * full.kv_elements(4096) / 1e9 == pytest.approx(10.74, abs=0.005)


def test_7b_weights_and_100_sequences_of_1_024_tokens_take_67_69_gb() -> None:
    """14 GB of weights (7e9 parameters of 16 bits) and 53.69 GB of KV without grouped queries: 524,288 bytes
    for each of 102,400 tokens of a model with 32 layers of 32 heads of 128."""
    llama_7b = models.LLAMA_8B | {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
    kv = 100 * 2 * _work(llama_7b).kv_elements(1024)
    assert (7e9 * 2 + kv) / 1e9 == pytest.approx(67.69, abs=0.005)


def test_decoding_mla_reads_one_latent_for_all_heads_and_prefill_projects_it() -> None:
    (latent,) = _work(models.DEEPSEEK_V3).attention
    assert latent.elements == 576
    # Absorbed: 128 heads, 576 for the product with keys and 512 for values, two operations each.
    assert latent.flops == 2 * 128 * (576 + 512)
    # Unabsorbed: heads of 192 and 128.
    assert latent.prompt_flops == 2 * 128 * (192 + 128)
    whole = _work(models.DEEPSEEK_V3).prompt_flops(4096, 0)
    chunks = sum(_work(models.DEEPSEEK_V3).prompt_flops(1024, done) for done in range(0, 4096, 1024))
    assert chunks > whole


def test_chunks_of_a_prompt_attend_to_as_many_tokens_as_the_whole_prompt() -> None:
    for window in (0, 300):
        layer = AttentionWork(1, 4.0, 2.0, window)
        chunks = sum(layer.pairs(100, done) for done in range(0, 1000, 100))
        assert chunks == pytest.approx(layer.pairs(1000, 0))
    assert AttentionWork(1, 4.0, 2.0).pairs(4, 0) == 1 + 2 + 3 + 4
    assert AttentionWork(1, 4.0, 2.0, 2).pairs(4, 0) == 1 + 2 + 2 + 2


def test_a_sliding_window_bounds_what_a_query_reads() -> None:
    work = _work(models.GEMMA3_27B)
    slides, full = sorted(work.attention, key=lambda each: -each.window)
    assert (slides.layers, full.layers, slides.window) == (52, 10, 1024)
    grown = work.kv_elements(100_000) - work.kv_elements(50_000)
    assert grown == 50_000 * full.layers * full.elements


def test_recurrent_layers_read_a_state_in_place_of_kv() -> None:
    work = _work(models.GRANITE4_SMALL)
    (attention,) = work.attention
    assert attention.layers == 4
    # 36 layers of 128 heads of 64 with 128 states, and a convolution's last three inputs, 16 bits each.
    assert work.state_bytes == 36 * 2 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 128))


def test_steps_with_few_tokens_read_few_experts() -> None:
    work = _work(models.QWEN3_30B)
    assert work.experts_read(1) == pytest.approx(8)
    assert work.experts_read(4) < 32
    assert work.experts_read(1000) == pytest.approx(128, rel=0.001)


def test_an_encoder_attends_to_every_token_and_keeps_nothing() -> None:
    bert = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522,
        "max_position_embeddings": 512,
    }  # fmt: skip
    work = _work(bert)
    assert work.parameters == pytest.approx(109e6, rel=0.02)
    assert work.head == 0.0
    assert work.kv_elements(512) == 0.0
    decoder = replace(work, attention=(replace(work.attention[0], flops=4.0 * 768),))
    assert work.prompt_flops(512, 0) == 2 * decoder.prompt_flops(512, 0)
