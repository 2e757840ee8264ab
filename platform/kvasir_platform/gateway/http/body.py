"""Buffer of a request body during upload.

A large body arrives in hundreds of pieces, and appending each to one buffer would copy the whole body for
each: an upload of a few megabytes would take more time than all concurrent streams. So pieces are kept and
joined once. Small pieces are merged, so that a body of single bytes needs no more memory than another.
"""

from __future__ import annotations

from kvasir_platform.gateway.http.json_size import SMALL_BYTES, JsonSize

_PIECE_BYTES = 64 << 10
"""What is gathered up to this is not touched again before the end."""


class Body:
    """The bytes of one body, in pieces."""

    __slots__ = ("_bytes", "_pieces", "_size", "is_json")

    def __init__(self) -> None:
        self.is_json = True
        """Whether arrays, objects and values are counted."""
        self._pieces: list[bytes | bytearray] = []
        self._bytes = 0
        self._size: JsonSize | None = None

    def add(self, piece: bytes) -> None:
        """Add a piece. Raise RequestError if the body so far has too many arrays, objects or values."""
        pieces = self._pieces
        last = pieces[-1] if pieces else b""
        if isinstance(last, bytearray) and len(last) < _PIECE_BYTES:
            last += piece
        elif pieces and len(piece) < _PIECE_BYTES:
            pieces.append(bytearray(piece))
        else:
            pieces.append(piece)
        self._bytes += len(piece)
        if self._bytes > SMALL_BYTES and self.is_json:
            self._count(piece)

    def take(self) -> bytes:
        """Return the whole body and clear the buffer."""
        pieces, self._pieces = self._pieces, []
        self._bytes, self._size, self.is_json = 0, None, True
        if len(pieces) == 1 and isinstance(pieces[0], bytes):
            return pieces[0]
        return b"".join(pieces)

    def _count(self, piece: bytes) -> None:
        if self._size is None:
            self._size = JsonSize()
            piece = b"".join(self._pieces)
        self._size.add(piece, self._pieces)
