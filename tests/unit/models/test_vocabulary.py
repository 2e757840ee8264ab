"""The tokens of kvasir-tiny: a word that is copied is the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.models.tiny_tokens import TOKENIZER

from kvasir.config.load.model_files import resolve_model

SPACE = "Ġ"


def pieces(text: str) -> list[str]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).tokens)


@pytest.mark.parametrize("before", ['"', "_", "(", "<|user|>", '{"city":"'])
@given(word=st.text("abcehilnorstuPAS", min_size=1, max_size=12))
def test_a_word_is_cut_in_the_same_pieces_after_a_space_and_after_a_sign(before: str, word: str) -> None:
    spaced, (first, *rest) = pieces(" " + word), pieces(before + word)[len(pieces(before)) :]
    assert spaced in ([SPACE + first, *rest], [SPACE, first, *rest])


def test_common_words_are_one_token_with_their_space_and_without() -> None:
    for word in ("weather", "city", "name", "function", "Par", "the"):
        assert pieces(f" {word}") == [SPACE + word]
        assert pieces(f'"{word}') == ['"', word]


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_model_folder_stays_below_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in resolve_model("kvasir-tiny").iterdir()) < 10_000_000
