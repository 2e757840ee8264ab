"""How the files of a request with media get to another cell: in pieces, before the request.

A link has beats, by which its ends know that the other one lives; a file of megabytes in one message would
hold them up for longer than the lease. A message has therefore one piece at most, and pieces are sent only as
long as few bytes are under way, which the other end shows by what it has read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import msgspec

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import Request

PIECE_BYTES = 128 << 10
MAX_UNDER_WAY = 512 << 10
"""Bytes of pieces that the other end has not read yet: half a second of 10 Mbit/s."""
MAX_REQUEST_BYTES = 32 << 20
"""Bytes of the media of one request. Requests with more stay in their cell."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes of media that wait to be sent to one cell. Requests beyond them are refused, and go elsewhere."""
_MAX_ITEMS = 4096


class MediaPiece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one item of a request, which follow those of the pieces before it."""

    request_id: str
    item: int
    data: bytes


def media_bytes(request: Request) -> int:
    """Return the bytes of the files of a request."""
    return sum(len(item.data) for item in request.media)


class _Files:
    """The files of one request, and how much of them has been sent."""

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.left = media_bytes(request)
        self._pieces = deque(
            (number, memoryview(item.data)[at : at + PIECE_BYTES])
            for number, item in enumerate(request.media)
            for at in range(0, max(1, len(item.data)), PIECE_BYTES)
        )

    def next(self) -> tuple[MediaPiece, bool]:
        """Return the next piece, and whether it is the last one."""
        number, data = self._pieces.popleft()
        self.left -= len(data)
        return MediaPiece(self.request_id, number, bytes(data)), not self._pieces


class MediaSender:
    """The files that wait to be sent over one link, one request after the other."""

    def __init__(self) -> None:
        self._waiting: deque[_Files] = deque()
        self._under_way: deque[tuple[float, int]] = deque()

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait."""
        return sum(files.left for files in self._waiting)

    @property
    def can_send(self) -> bool:
        """Whether there is something to send, and the other end reads in time."""
        return bool(self._waiting) and sum(size for _, size in self._under_way) < MAX_UNDER_WAY

    def add(self, request: Request) -> Request:
        """Have the files of a request sent; return it without them."""
        self._waiting.append(_Files(request))
        return replace(request, media=tuple(replace(item, data=b"") for item in request.media))

    def drop(self, request_id: str) -> None:
        """Send nothing more of a request."""
        self._waiting = deque(files for files in self._waiting if files.request_id != request_id)

    def next(self, now: float) -> tuple[MediaPiece, bool]:
        """Return what the message of this moment has, and whether the request's files are complete with it.
        Call it only if `can_send`."""
        piece, done = self._waiting[0].next()
        self._under_way.append((now, len(piece.data)))
        if done:
            self._waiting.popleft()
        return piece, done

    def read(self, sent_s: float) -> None:
        """The other end has read the message of this moment."""
        while self._under_way and self._under_way[0][0] <= sent_s:
            self._under_way.popleft()


class MediaReceiver:
    """The files of the request that comes next over one link."""

    def __init__(self) -> None:
        self._request_id = ""
        self._items: dict[int, bytearray] = {}
        self._size = 0

    def take(self, piece: MediaPiece) -> None:
        """Take a piece. Those of another request take the place of the ones before. Raise ProtocolError for
        too many bytes."""
        if piece.request_id != self._request_id:
            self._request_id, self._items, self._size = piece.request_id, {}, 0
        self._size += len(piece.data)
        if self._size > MAX_REQUEST_BYTES or not 0 <= piece.item < _MAX_ITEMS:
            raise ProtocolError(f"the media of request {piece.request_id} exceed {MAX_REQUEST_BYTES} bytes")
        self._items.setdefault(piece.item, bytearray()).extend(piece.data)

    def attached(self, request: Request) -> Request:
        """Return a request with its files. Raise CapacityError if they have not come."""
        if not request.media:
            return request
        items, whole = self._items, request.request_id == self._request_id
        self._request_id, self._items, self._size = "", {}, 0
        if not whole or items.keys() != set(range(len(request.media))):
            raise CapacityError(f"the media of request {request.request_id} did not come before it")
        return replace(request, media=tuple(_with(item, items[at]) for at, item in enumerate(request.media)))


def _with(item: PromptMedia, data: bytearray) -> PromptMedia:
    return replace(item, data=bytes(data))
