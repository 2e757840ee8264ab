"""A model's config.json, and the part of it that describes the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.checkpoint.architectures import kind_of
from kvasir.checkpoint.json_file import read_json, read_json_object
from kvasir.checkpoint.model_types import MODEL_TYPES
from kvasir.checkpoint.positions import supported_positions, unscaled_positions

_TEXT_KEYS = (
    "thinker_config",
    "vlm_config",
    "text_config",
    "llm_config",
    "language_config",
    "text_encoder",
    "decoder",
    "generator",
)
"""Keys under which composite models nest the configuration of their language model, as transformers and vLLM
look for them."""
_SENTENCE_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_POOLING_MODULES = {
    "sentence_transformers.models.Pooling",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of the model in `folder`.

    `raw` is config.json, with the quantization that ModelOpt writes into a file of its own, and `text` the
    configuration of the language model in it: a nested one, or `raw` itself. `sentence_length` is the
    maximum of a Sentence Transformers model and `tokenizer_length` that of the tokenizer, in tokens;
    `pools_sentences` says that the folder describes how to pool the vectors of a sentence."""

    folder: Path
    raw: Mapping[str, Any]
    text: Mapping[str, Any]
    sentence_length: int | None = None
    tokenizer_length: int | None = None
    pools_sentences: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names of the model's classes."""
        stated = self.raw.get("architectures")
        return tuple(map(str, stated)) if isinstance(stated, list) else ()

    @property
    def model_type(self) -> str:
        """The type of the whole model, "" if config.json has none."""
        return str(self.raw.get("model_type") or "")

    @property
    def text_type(self) -> str:
        """The type of the language model in it."""
        nested = f"{self.model_type}_text"
        inferred = nested if self.text is not self.raw and nested in MODEL_TYPES else self.model_type
        return str(self.text.get("model_type") or inferred)

    @property
    def max_positions(self) -> int | None:
        """Maximum tokens of prompt and output together, as vLLM derives it. None if neither config.json nor a
        default of its type says."""
        if self.sentence_length is not None:
            return self.sentence_length
        positions = supported_positions(self.text, self.text_type)
        encodes = kind_of(self.architectures) in ("pooling", "scoring")
        absolute = encodes and self.raw.get("position_embedding_type") == "absolute"
        if positions and self.tokenizer_length and absolute:
            return min(positions, self.tokenizer_length)
        return positions

    @property
    def default_positions(self) -> int | None:
        """The maximum with which vLLM serves the model if none is configured: fewer than `max_positions` for
        LongRoPE, whose scaling degrades short sequences."""
        return unscaled_positions(self.text) or self.max_positions

    @property
    def dtype(self) -> str | None:
        """The dtype in which the weights are meant to be served, such as bfloat16; None if none is stated."""
        vision = self.raw.get("vision_config")
        for part in (self.raw, self.text, vision if isinstance(vision, dict) else {}):
            if stated := part.get("dtype") or part.get("torch_dtype"):
                return str(stated).removeprefix("torch.")
        return None

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """How the weights are quantized, None if they are not."""
        for part in (self.raw, self.text):
            for key in ("quantization_config", "compression_config"):
                if isinstance(stated := part.get(key), dict):
                    return stated
        return None

    def overridden(self, values: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration with `values` in the place of config.json's, nested ones by their keys, as
        vLLM applies its `hf_overrides`."""
        raw = _merged(self.raw, values)
        return replace(self, raw=raw, text=_text_of(raw))


def read_model_config(folder: Path) -> ModelConfig:
    """Return the configuration of the model in `folder`. Raises ConfigError, which names the file, if a file
    is missing or is not a JSON object."""
    raw = read_json_object(folder / "config.json")
    separate = folder / "hf_quant_config.json"
    if raw.get("quantization_config") is None and separate.is_file():
        raw["quantization_config"] = read_json_object(separate)
    return ModelConfig(
        folder,
        raw,
        _text_of(raw),
        sentence_length=_sentence_length(folder),
        tokenizer_length=_length_in(folder / "tokenizer_config.json", "model_max_length"),
        pools_sentences=_pools_sentences(folder),
    )


def _merged(stated: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(stated)
    for key, value in values.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _text_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _TEXT_KEYS:
        nested = raw.get(key)
        if isinstance(nested, dict) and nested:
            return _text_of(nested)
    return raw


def _sentence_length(folder: Path) -> int | None:
    lengths = (_length_in(folder / name, "max_seq_length") for name in _SENTENCE_FILES)
    return next((length for length in lengths if length), None)


def _length_in(path: Path, key: str) -> int | None:
    length = read_json_object(path).get(key) if path.is_file() else None
    return int(length) if isinstance(length, int | float) and length > 0 else None


def _pools_sentences(folder: Path) -> bool:
    path = folder / "modules.json"
    modules = read_json(path, list[dict[str, Any]]) if path.is_file() else []
    return any(str(module.get("type")) in _POOLING_MODULES for module in modules)
