"""An encoder with injectable errors, and shared helpers of tokenizing tests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kit.gateway.tokenizer_families import tokenizer_json
from tokenizers import Tokenizer

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.gateway.prompt.fast_tokenizer import Reference

TINY = resolve_model("kvasir-tiny") / "tokenizer.json"
CHAT = "<|bos|><|user|>Hello there!<|end|><|user|>again<|end|>"
"""A conversation with the special tokens of all families and of kvasir-tiny."""


def ids_of(reference: Reference, text: str, special: bool = False) -> list[array[int]]:
    return [array("I", ids) for ids in reference.encode([text], add_special_tokens=special)]


class Liar:
    """An encoder that encodes texts with `wrong` in them incorrectly, or raises on them."""

    fast = True
    failures = 0

    def __init__(self, honest: Reference, *, wrong: str, error: BaseException | None = None) -> None:
        self._honest = honest
        self._wrong = wrong
        self._error = error

    @property
    def vocabulary(self) -> int:
        return self._honest.vocabulary

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, ordinary: bool = False
    ) -> list[bytes]:
        made = self._honest.encode(texts, add_special_tokens=add_special_tokens, ordinary=ordinary)
        if self._error is not None and any(self._wrong in text for text in texts):
            raise self._error
        return [
            array("I", [7]).tobytes() + ids if self._wrong in text else ids
            for text, ids in zip(texts, made, strict=True)
        ]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._honest.decode(ids, skip_special_tokens=skip_special_tokens)

    def names(self, ids: Sequence[int]) -> list[str | None]:
        return self._honest.names(ids)


def save(folder: Path, make: Callable[[], Tokenizer]) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer_json(make), encoding="utf-8")
    return path
