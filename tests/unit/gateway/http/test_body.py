"""The cost of receiving a body, however it is split."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.gateway.http.body import Body

KIB = 1 << 10


def allocated(pieces: Iterable[bytes]) -> tuple[Body, int]:
    """A body of these, and the most that was allocated for it beyond themselves."""
    given = list(pieces)
    body = Body()
    tracemalloc.start()
    try:
        for piece in given:
            body.add(piece)
        return body, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(1, 5) | st.sampled_from((60 * KIB, 64 * KIB, 65 * KIB)), max_size=12))
def test_a_body_is_what_came_in_the_order_in_which_it_came(sizes: list[int]) -> None:
    body = Body()
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    for piece in pieces:
        body.add(piece)
    assert body.take() == b"".join(pieces)
    assert body.take() == b""


def test_a_body_that_comes_in_one_piece_is_that_piece() -> None:
    body = Body()
    piece = bytes(100)
    body.add(piece)
    assert body.take() is piece


def test_large_pieces_are_not_copied_as_they_come() -> None:
    body, extra = allocated(bytes(128 * KIB) for _ in range(64))
    assert extra < 16 * KIB
    assert len(body.take()) == 64 * 128 * KIB


def test_single_bytes_take_no_more_memory_than_a_body_in_one_piece() -> None:
    body, extra = allocated(b"a" for _ in range(512 * KIB))
    assert extra < 640 * KIB
    assert len(body.take()) == 512 * KIB
