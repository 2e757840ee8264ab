"""What a model that classifies says about its classes and its input, read as vLLM and transformers do."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.checkpoint.architectures import classifies
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.core.errors import ConfigError

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
    """Return the classes of the model with `config`, None if it does not classify. Raises ConfigError for
    labels without numbers."""
    if not classifies(config.architectures):
        return None
    raw, types = config.raw, config.raw.get("type_vocab_size")
    by_words = raw.get("method") is not None or bool(raw.get("is_original_qwen3_reranker"))
    return Classes(
        labels=_labels(config),
        separated=bool(raw.get("use_pad_token", raw.get("use_sep_token", not by_words))),
        typed=isinstance(types, int) and types > 1,
    )


def _labels(config: ModelConfig) -> tuple[str, ...]:
    raw, text = config.raw, config.text
    words = raw.get("classifier_from_token") or text.get("classifier_from_token")
    if words:
        two_way = raw.get("is_original_qwen3_reranker") or raw.get("method") == "from_2_way_softmax"
        return ("LABEL_0",) if two_way else tuple(map(str, words))
    for part in (raw, text):
        named = part.get("id2label")
        if isinstance(named, dict) and named:
            if not all(str(key).isdecimal() for key in named):
                path = config.folder / "config.json"
                raise ConfigError(f"{path}: the keys of id2label must be the numbers of the classes")
            return tuple(str(named[key]) for key in sorted(named, key=int))
        if isinstance(number := part.get("num_labels"), int):
            return _numbered(number)
    return _numbered(_DEFAULT_CLASSES)


def _numbered(number: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(number))
