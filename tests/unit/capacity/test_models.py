"""Built-in shapes, and weights counted from config.json, agree with what the checkpoints hold."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.sizing.fit import model_files
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import rank_weights
from kvasir_platform.capacity.known_models import KNOWN_MODELS
from kvasir_platform.capacity.models import known_model, planned_model


@pytest.mark.parametrize(
    "values",
    [
        models.LLAMA_8B,
        models.LLAMA_70B,
        models.QWEN3_30B,
        models.GPT_OSS_120B,
        models.DEEPSEEK_V3,
        models.GEMMA3_27B,
    ],
    ids=["llama-8b", "llama-70b", "qwen3-30b", "gpt-oss-120b", "deepseek-v3", "gemma-3-27b"],
)
@pytest.mark.parametrize("shape", [EngineShape(), EngineShape(tensor=8), EngineShape(tensor=4, pipeline=2)])
def test_weights_counted_from_config_json_are_those_of_the_tensors(
    values: dict[str, Any], shape: EngineShape
) -> None:
    config = models.config_of(values)
    counted = planned_model("m", "m", config)
    exact = model_files(config, models.tensors_of(values))
    assert counted.estimated
    assert max(rank_weights(config, counted.files.weights, shape)) == pytest.approx(
        max(rank_weights(config, exact.weights, shape)), rel=0.06
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-2-7b", 6.74),
        ("mistral-7b", 7.25),
        ("mixtral-8x7b", 46.7),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("gemma-3-27b", 27.0),
        ("bge-m3", 0.567),
    ],
)
def test_built_in_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = known_model(name)
    assert model is not None
    stored = sum(part.elements for part in model.files.weights)
    if model.config.quantization is not None:
        stored = model.work.parameters  # type: ignore[assignment]
    assert stored == pytest.approx(billions * 1e9, rel=0.02)


def test_a_built_in_model_is_found_by_its_hugging_face_id_too() -> None:
    for short, known in KNOWN_MODELS.items():
        found = known_model(known.source)
        assert found is not None
        assert found.name == short
    assert known_model("no-such-model") is None


def test_an_embedding_model_is_known_to_be_one() -> None:
    found, other = known_model("bge-m3"), known_model("llama-3.1-8b")
    assert found is not None
    assert other is not None
    assert (found.embeds, other.embeds) == (True, False)
