"""Files of requests on their way to another cell: in pieces, few at a time, and before their request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import Request, token_ids
from kvasir_platform.regions.needs import media
from kvasir_platform.regions.needs.media import (
    MAX_UNDER_WAY,
    PIECE_BYTES,
    MediaPiece,
    MediaReceiver,
    MediaSender,
    media_bytes,
)


def request(name: str, *data: bytes) -> Request:
    items = tuple(PromptMedia(at, 1, bytes(32), each) for at, each in enumerate(data))
    return Request(name, "m", token_ids(range(8)), media=items)


def moved(sender: MediaSender, receiver: MediaReceiver) -> str:
    """Send the files of the next request, each piece read at once; return its id."""
    last = False
    while not last:
        piece, last = sender.next(0.0)
        receiver.take(piece)
        sender.read(0.0)
    return piece.request_id


@pytest.mark.parametrize("sizes", [(1,), (0,), (PIECE_BYTES, 0, 3 * PIECE_BYTES + 1), (5, 5)])
def test_files_arrive_as_they_were(sizes: tuple[int, ...]) -> None:
    sender, receiver = MediaSender(), MediaReceiver()
    whole = request("r", *(bytes([at + 1]) * size for at, size in enumerate(sizes)))
    bare = sender.add(whole)
    assert media_bytes(bare) == 0
    assert sender.waiting_bytes == media_bytes(whole) == sum(sizes)
    assert moved(sender, receiver) == "r"
    assert receiver.attached(bare) == whole
    assert (sender.waiting_bytes, sender.can_send) == (0, False)


def test_few_bytes_are_under_way_until_the_other_end_has_read_some() -> None:
    sender = MediaSender()
    sender.add(request("r", bytes(20 * PIECE_BYTES)))
    sent = 0
    while sender.can_send:
        piece, _ = sender.next(float(sent))
        assert len(piece.data) <= PIECE_BYTES
        sent += 1
    assert sent * PIECE_BYTES == MAX_UNDER_WAY
    sender.read(-1.0)
    assert not sender.can_send
    sender.read(0.0)
    assert sender.can_send


def test_a_request_that_is_cancelled_half_way_leaves_nothing_behind() -> None:
    sender, receiver = MediaSender(), MediaReceiver()
    first, second = request("a", bytes(3 * PIECE_BYTES)), request("b", b"whole")
    sender.add(first)
    bare = sender.add(second)
    piece, last = sender.next(0.0)
    receiver.take(piece)
    assert not last
    sender.drop("a")
    assert sender.waiting_bytes == 5
    assert moved(sender, receiver) == "b"
    assert receiver.attached(bare) == second


def test_a_request_without_its_files_is_refused() -> None:
    receiver = MediaReceiver()
    bare = request("r", b"", b"")
    with pytest.raises(CapacityError, match="did not come before it"):
        receiver.attached(bare)
    receiver.take(MediaPiece("r", 0, b"one"))
    with pytest.raises(CapacityError, match="did not come before it"):
        receiver.attached(bare)
    receiver.take(MediaPiece("another", 0, b"one"))
    with pytest.raises(CapacityError, match="did not come before it"):
        receiver.attached(replace(bare, media=bare.media[:1]))
    text = replace(bare, media=())
    assert receiver.attached(text) is text


def test_more_bytes_than_a_request_may_have_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_REQUEST_BYTES", 10)
    receiver = MediaReceiver()
    receiver.take(MediaPiece("r", 0, bytes(10)))
    with pytest.raises(ProtocolError, match="exceed 10 bytes"):
        receiver.take(MediaPiece("r", 1, b"x"))
    with pytest.raises(ProtocolError, match="exceed"):
        MediaReceiver().take(MediaPiece("r", -1, b""))
