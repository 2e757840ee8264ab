"""What a model that classifies says about its classes and its input, read as vLLM and transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.checkpoint.architectures import classifies
from kvasir.checkpoint.model_config import ModelConfig

_DEFAULT_CLASSES = 2
"""Those of a configuration of transformers that names none."""


@dataclass(frozen=True, slots=True)
class Classes:
    """`labels` names the classes, in the order of the model's output. `separated`: special tokens of the
    tokenizer stand between the texts of a pair; otherwise one text follows the other. `typed`: the model has
    token types, which tell the texts of a pair apart."""

    labels: tuple[str, ...]
    separated: bool = True
    typed: bool = False

    @property
    def scores(self) -> bool:
        """Whether the output is one number, the relevance of a pair."""
        return len(self.labels) == 1


def classes_of(config: ModelConfig) -> Classes | None:
    """Return the classes of the model with `config`, None if it does not classify."""
    if not classifies(config.architectures):
        return None
    raw = config.raw
    by_words = raw.get("method") is not None or bool(raw.get("is_original_qwen3_reranker"))
    return Classes(
        labels=_labels(raw, config.text),
        separated=bool(raw.get("use_pad_token", raw.get("use_sep_token", not by_words))),
        typed=int(raw.get("type_vocab_size") or 0) > 1,
    )


def _labels(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, ...]:
    words = raw.get("classifier_from_token") or text.get("classifier_from_token")
    if words:
        two_way = raw.get("is_original_qwen3_reranker") or raw.get("method") == "from_2_way_softmax"
        return ("LABEL_0",) if two_way else tuple(map(str, words))
    for part in (raw, text):
        named = part.get("id2label")
        if isinstance(named, dict) and named:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        if isinstance(number := part.get("num_labels"), int):
            return _numbered(number)
    return _numbered(_DEFAULT_CLASSES)


def _numbered(number: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(number))
