"""One function frames the chunks of both paths: JSON that any parser reads, in valid HTTP chunks."""

from __future__ import annotations

import json
from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir import native
from kvasir.native import _twin_framing

BOTH = pytest.mark.parametrize("core", [native, _twin_framing], ids=["native", "twin"])
BEFORE, AFTER = b'data: {"text":', b"}\n\n"
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\/\b\f\n\r\t\x00\x1f\x7f\u2028')
)


@BOTH
@given(text=TEXTS)
def test_a_piece_is_its_text_as_json_between_both_constants(core: ModuleType, text: str) -> None:
    framed = core.frame_piece(BEFORE, text, AFTER, False)
    assert framed == BEFORE + msgspec.json.encode(text) + AFTER
    assert json.loads(framed[len(BEFORE) : -len(AFTER)]) == text


@BOTH
@given(text=TEXTS)
def test_a_chunk_says_its_size_in_hexadecimal(core: ModuleType, text: str) -> None:
    whole = core.frame_piece(BEFORE, text, AFTER, False)
    size, _, rest = core.frame_piece(BEFORE, text, AFTER, True).partition(b"\r\n")
    assert int(size, 16) == len(whole)
    assert rest == whole + b"\r\n"
    assert core.http_chunk(whole) == b"%b\r\n%b" % (size, rest)


@BOTH
@pytest.mark.parametrize("size", [15, 16, 255, 256, 70_000])
def test_sizes_of_all_lengths_are_written(core: ModuleType, size: int) -> None:
    assert core.http_chunk(b"x" * size) == b"%x\r\n%b\r\n" % (size, b"x" * size)


@BOTH
def test_a_lone_surrogate_is_refused(core: ModuleType) -> None:
    with pytest.raises(UnicodeEncodeError):
        core.frame_piece(BEFORE, "a\ud800", AFTER, True)
