"""A model's config.json, and the part of it that describes the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.checkpoint.json_file import read_json_object
from kvasir.checkpoint.positions import stated_positions, unscaled_positions

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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of the model in `folder`. `raw` is config.json, with the quantization that ModelOpt
    writes into a file of its own, and `text` the configuration of the language model in it: a nested one, or
    `raw` itself. `sentence_length` is the maximum of a Sentence Transformers model, in tokens."""

    folder: Path
    raw: Mapping[str, Any]
    text: Mapping[str, Any]
    sentence_length: int | None = None

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
    def max_positions(self) -> int | None:
        """Maximum tokens of prompt and output together, as vLLM derives it. None if config.json does not say,
        and vLLM then takes the architecture's default."""
        if self.sentence_length is not None:
            return self.sentence_length
        return stated_positions(self.text, str(self.text.get("model_type") or self.model_type))

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


def read_model_config(folder: Path) -> ModelConfig:
    """Return the configuration of the model in `folder`. Raises ConfigError, which names the file, if a file
    is missing or is not a JSON object."""
    raw = read_json_object(folder / "config.json")
    separate = folder / "hf_quant_config.json"
    if raw.get("quantization_config") is None and separate.is_file():
        raw["quantization_config"] = read_json_object(separate)
    return ModelConfig(folder, raw, _text_of(raw), _sentence_length(folder))


def _text_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _TEXT_KEYS:
        nested = raw.get(key)
        if isinstance(nested, dict) and nested:
            return _text_of(nested)
    return raw


def _sentence_length(folder: Path) -> int | None:
    for name in _SENTENCE_FILES:
        if (path := folder / name).is_file():
            length = read_json_object(path).get("max_seq_length")
            if isinstance(length, int) and length > 0:
                return length
    return None
