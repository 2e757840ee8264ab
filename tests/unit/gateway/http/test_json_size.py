"""The count of a body's arrays, objects and values before anything is built from it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.body import Body
from kvasir_platform.gateway.http.json_size import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    JsonSize,
    JsonTexts,
)

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a[{",\\\n]}ö'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b{["\\,'), inner),
    max_leaves=30,
)


def containers(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


def sent(data: bytes, size: int = 64 << 10) -> None:
    """Raises RequestError where the body is refused."""
    body = Body()
    for at in range(0, len(data), size):
        body.add(data[at : at + size])
    assert body.take() == data


@given(JSON, st.integers(1, 9))
def test_what_is_counted_exactly_is_what_a_decoder_makes_wherever_the_pieces_are_cut(
    value: object, size: int
) -> None:
    data = json.dumps(value, ensure_ascii=False).encode()
    whole = JsonSize()
    # More brackets than are allowed, all in a string: from there on they are counted exactly.
    begin = b'["' + b"[" * (MAX_CONTAINERS + 1) + b'", '
    whole.add(begin, [begin])
    for at in range(0, len(data), size):
        whole.add(data[at : at + size], [])
    assert whole.containers == containers(value) + 1


@pytest.mark.parametrize("size", [0, 1, (2 << 10) - 1, 2 << 10, (2 << 10) + 1, 100_000])
def test_the_first_count_of_a_piece_is_of_its_bytes_whatever_its_size(size: int) -> None:
    data = random.Random(size).choices(b'[{,"]}:\\a \x00\xdb\xff', k=size)
    piece, counted = bytes(data), JsonSize()
    counted.add(piece, [piece])
    found = counted.containers, counted.values, counted.quotes
    assert found == (data.count(91) + data.count(123), data.count(44), data.count(34))


def test_brackets_and_commas_in_a_prompt_are_no_values() -> None:
    code = 'x[i] = {a, b};\n\t"\\' * (MAX_VALUES // 2)
    sent(json.dumps({"prompt": code}).encode())


@pytest.mark.parametrize(
    "inside",
    [
        b"[]," * (MAX_CONTAINERS + 1),
        b"{}," * (MAX_CONTAINERS + 1),
        b'{"a":{"b":[]}},' * (MAX_CONTAINERS // 3 + 1),
        b"0," * (MAX_VALUES + 1),
        b'"a",' * (MAX_STRINGS + 1),
    ],
    ids=["arrays", "objects", "nested", "numbers", "strings"],
)
@pytest.mark.parametrize("text", [0, 2 << 20], ids=["alone", "after text"])
@pytest.mark.parametrize("size", [1000, 64 << 10], ids=["small pieces", "large pieces"])
def test_a_body_with_too_many_values_is_refused_while_it_arrives(inside: bytes, text: int, size: int) -> None:
    data = b'{"prompt":"' + b"[" * text + b'","a":[' + inside + b"0]}"
    with pytest.raises(RequestError) as refused:
        sent(data, size)
    assert refused.value.code == "body_too_complex"


def test_a_body_at_the_limits_is_accepted() -> None:
    sent(b'{"a":[' + b"[]," * (MAX_CONTAINERS - 2) + b"0]}")
    sent(b'{"a":[' + b"0," * MAX_VALUES + b"0]}")


def test_no_more_is_counted_than_is_needed_to_refuse() -> None:
    taken = 0

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield b"[" * MAX_CONTAINERS

    size = JsonSize()
    with pytest.raises(RequestError):
        size.add(b"[" * (MAX_CONTAINERS + 1), pieces())
    assert size.containers <= 2 * MAX_CONTAINERS


def test_json_in_strings_is_counted_over_all_of_them() -> None:
    texts, text = JsonTexts(), "[" + "[]," * 999 + "[]]"
    for _ in range(MAX_CONTAINERS // 1001):
        texts.add(text)
    with pytest.raises(RequestError, match="JSON texts"):
        texts.add(text)
