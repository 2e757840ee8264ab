"""What drafts, heads and prediction layers add to an engine's memory, worked by hand."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.checkpoint.tensors import TensorHeader
from kvasir.hardware.gpus import gpu_named
from kvasir.sizing.drafts import Draft, draft_model, medusa_heads, prediction_layers, predictor_parts
from kvasir.sizing.fit import Fit, ModelFiles, Need, RankMemory, fit, need_of
from kvasir.sizing.remedies import Attempt, remedies
from kvasir.sizing.report import describe
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import weight_parts

KIB, MIB = 1 << 10, 1 << 20
H100 = gpu_named("H100")
assert H100 is not None
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "head_dim": 64,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16,
    "vocab_size": 128256, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
EAGLE = models.LLAMA_8B | {"num_hidden_layers": 1}
VICUNA_MEDUSA: dict[str, Any] = {
    "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 4096, "num_heads": 3,
    "num_hidden_layers": 1, "vocab_size": 32000,
}  # fmt: skip


def header(name: str, *shape: int) -> TensorHeader:
    return TensorHeader(name, "BF16", shape, 2 * prod(shape), "model.safetensors")


def eagle() -> Draft:
    """A head as yuhuili/EAGLE-LLaMA3.1-Instruct-8B: a layer of the model, and a projection of its input."""
    config = models.config_of(EAGLE)
    layer = [each for each in models.tensors_of(EAGLE) if each.name.startswith("model.layers.")]
    return draft_model(config, weight_parts(config, [header("fc.weight", 4096, 8192), *layer]))


def small() -> Draft:
    config = models.config_of(LLAMA_1B)
    return draft_model(config, weight_parts(config, models.tensors_of(LLAMA_1B)))


def need(draft: Draft | None, values: dict[str, Any] = models.LLAMA_8B, **shape: Any) -> Need:
    config = models.config_of(values)
    files = ModelFiles(config, weight_parts(config, models.tensors_of(values)), draft)
    return need_of(files, EngineShape(**shape))


def token(found: Need) -> list[float]:
    """Bytes of KV of a token on each stage."""
    return [each / 4096 for each in found.kv.request_bytes]


def on_an_h100(found: Need) -> Fit:
    assert H100 is not None
    return fit(found, RankMemory(H100.memory_bytes, 0.9))


def test_an_eagle_head_adds_a_layer_and_its_projection() -> None:
    found = need(eagle())
    projection = 4096 * 8192
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096
    mlp, norms = 3 * 14336 * 4096, 2 * 4096
    assert found.drafts == (2 * (projection + attention + mlp + norms),)
    assert found.drafts[0] / MIB == pytest.approx(480.0, abs=0.1)
    # 8 KV heads of 128 numbers of 2 bytes, twice, in 32 layers and one.
    assert token(need(None)) == [32 * 4 * KIB]
    assert token(found) == [33 * 4 * KIB]


def test_a_draft_model_adds_all_that_it_is() -> None:
    found = need(small())
    layer = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048
    assert found.drafts == (2 * (128256 * 2048 + 16 * layer + 2048),)
    assert found.drafts[0] == 2_471_628_800
    # Its heads are half as large, in 16 layers.
    assert token(found) == [32 * 4 * KIB + 16 * 2 * KIB]


def test_both_leave_fewer_tokens_of_kv_on_a_gpu() -> None:
    plain, head, model = (on_an_h100(need(draft)) for draft in (None, eagle(), small()))
    assert plain.free - head.free == need(eagle()).drafts[0]
    assert head.tokens == pytest.approx(head.free / (132 * KIB), rel=0.001)
    assert model.tokens == pytest.approx(model.free / (160 * KIB), rel=0.001)
    sentence = describe(model, need(small()), "H100")
    assert "15.0 weights + 2.3 draft + " in sentence


def test_ranks_divide_a_draft_as_the_model() -> None:
    one, two = need(small()).drafts[0], need(small(), tensor=2).drafts[0]
    norms = 2 * (16 * 2 * 2048 + 2048)
    assert two == (one - norms) // 2 + norms
    assert token(need(small(), tensor=2)) == [80 * KIB]


def test_a_draft_is_on_the_last_stage_and_a_head_without_an_embedding_copies_the_models_there() -> None:
    staged = need(small(), pipeline=2)
    assert staged.drafts == (0, 2_471_628_800)
    assert token(staged) == [16 * 4 * KIB, 16 * 4 * KIB + 16 * 2 * KIB]
    embedding = 2 * 128256 * 4096
    assert need(eagle(), pipeline=2).drafts == (0, need(eagle()).drafts[0] + embedding)


def test_medusas_heads_keep_no_kv_and_their_blocks_are_whole_on_each_rank() -> None:
    config = models.config_of(VICUNA_MEDUSA)
    block, vocabulary = 4096 * 4096, 32000 * 4096
    for names in (("blocks.{}.layers.0.weight", "lm_heads.{}.weight"), ("{}.0.linear.weight", "{}.1.weight")):
        tensors = [
            header(name.format(head), size, 4096)
            for head in range(3)
            for name, size in zip(names, (4096, 32000), strict=True)
        ]
        heads = medusa_heads(config, predictor_parts(config, tensors))
        assert need(heads).drafts == (2 * 3 * (block + vocabulary),)
        assert need(heads, tensor=2).drafts == (2 * 3 * (block + vocabulary // 2),)
        assert token(need(heads)) == token(need(None))


def test_the_models_own_prediction_layers_use_its_embedding_and_its_head() -> None:
    values = models.DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}
    config = models.config_of(values)
    own = [
        header("model.layers.61.embed_tokens.weight", 129280, 7168),
        header("model.layers.61.shared_head.head.weight", 129280, 7168),
        header("model.layers.61.eh_proj.weight", 7168, 2 * 7168),
        header("model.layers.61.enorm.weight", 7168),
    ]
    layers = prediction_layers(config, predictor_parts(config, own))
    files = ModelFiles(config, (), layers)
    found = need_of(files, EngineShape())
    assert found.drafts == (2 * (7168 * 2 * 7168 + 7168),)
    # MLA keeps 512 + 64 numbers of a token, in 61 layers and one.
    assert found.kv.request_bytes[0] / 4096 == 62 * 576 * 2


def test_layers_under_a_name_of_their_own_are_found_and_without_any_there_are_none() -> None:
    values = models.QWEN3_NEXT_80B | {"num_nextn_predict_layers": 1}
    tensors = [header("mtp.fc.weight", 2048, 4096), header("mtp.layers.0.self_attn.k_proj.weight", 512, 2048)]
    config = models.config_of(values)
    assert sum(part.elements for part in predictor_parts(config, tensors)) == 2048 * 4096 + 512 * 2048
    assert predictor_parts(models.config_of(models.LLAMA_8B), models.tensors_of(models.LLAMA_8B)) == ()


def test_where_only_the_draft_is_too_much_leaving_it_out_is_proposed() -> None:
    config = models.config_of(models.LLAMA_8B)
    files = ModelFiles(config, weight_parts(config, models.tensors_of(models.LLAMA_8B)), small())
    l4 = gpu_named("L4")
    assert l4 is not None
    memory = RankMemory(l4.memory_bytes, 0.85)
    shape = EngineShape(max_model_len=8192, kv_dtype="fp8", quantization="none", max_num_seqs=1)
    alone = fit(need_of(ModelFiles(config, files.weights), shape), memory)
    assert alone.missing == 0
    assert fit(need_of(files, shape), memory).missing > 0
    proposed = remedies(Attempt(files, shape, memory, l4, 1.0))
    assert "leave engine.speculative out" in proposed
