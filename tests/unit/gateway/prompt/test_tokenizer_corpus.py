"""The encoder in use gives the reference's tokens and text for a corpus."""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.kit.gateway.encoders import CHAT, TINY, save
from tests.kit.gateway.tokenizer_families import EACH_PROVABLE, ROOT
from tokenizers import Tokenizer

from kvasir_platform.gateway.prompt.fast_tokenizer import ProvenEncoder, Reference, load_encoder

_BLOCK = 64
"""Characters of one text of the Unicode corpus."""


@cache
def documents() -> tuple[str, ...]:
    """The pages of this repository: whole, and by paragraph."""
    whole = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    assert len(whole) > 30
    return (*whole, *(part for text in whole for part in text.split("\n\n")))


@cache
def edge_cases() -> tuple[str, ...]:
    """Every assigned character up to U+33FF and some of the others, bare and within words and white space;
    the normal forms; and what separates, joins and repeats."""
    return tuple(_edge_cases())


def _edge_cases() -> Iterator[str]:
    codes = [*range(0x3400), *range(0x3400, 0x110000, 64)]
    assigned = [chr(code) for code in codes if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    for at in range(0, len(assigned), _BLOCK):
        some = assigned[at : at + _BLOCK]
        yield "".join(some)
        yield "".join(f"a{char}b 1{char}2 {char} {char}x\n{char}" for char in some)
    letters = "".join(assigned[:2048])
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield unicodedata.normalize(form, letters)
    for char in (
        " ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "a",
        "é",
        "東",
        "🙂",
        "\u200d",
        "\u0301",
        "!",
        "0",
        "<|",
        "\0",
    ):
        for count in (2, 3, 7, 16, 127):
            yield char * count
            yield f"x{char * count}y"
            yield (char + " ") * count
    yield "👩‍👩‍👧‍👦" * 50 + "🇩🇪" * 51 + "👍🏽" * 50
    yield "\u202eright to left\u202c \u2066isolated\u2069 \ufeffmark\ufeff \ufffd\ufffe\uffff"
    yield from (
        "<|user|>",
        "<|user|",
        "<|user|><|user|>",
        " <|end|> ",
        "x<|end|>y",
        CHAT,
        CHAT.replace("|", "||"),
    )


def assert_equal(path: Path) -> None:
    """Fail with the texts that differ, and where the reference had to answer for an error of the fast one."""
    encoder, reference = load_encoder(path, CHAT), Reference.from_file(path)
    assert isinstance(encoder, ProvenEncoder)
    texts = [*documents(), *edge_cases()]
    expected = reference.encode(texts, add_special_tokens=False)
    found = encoder.encode(texts, add_special_tokens=False)
    assert [text[:200] for text, a, b in zip(texts, expected, found, strict=True) if a != b] == []
    different = [
        text[:200]
        for text, made in zip(texts, expected, strict=True)
        if encoder.decode(ids := array("I", made), skip_special_tokens=True)
        != reference.decode(ids, skip_special_tokens=True)
    ]
    assert different == []
    assert encoder.failures == 0


def test_the_shipped_models_tokens_are_those_of_the_reference() -> None:
    pytest.importorskip("fastokens")
    assert_equal(TINY)


@EACH_PROVABLE
def test_each_familys_tokens_are_those_of_the_reference(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    pytest.importorskip("fastokens")
    assert_equal(save(tmp_path, make))
