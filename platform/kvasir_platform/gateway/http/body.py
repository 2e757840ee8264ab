"""Buffer of a request body during upload.

A large body arrives in hundreds of pieces, and appending each to one buffer would copy the whole body for
each: an upload of a few megabytes would take more time than all concurrent streams. So pieces are kept and
joined once. Small pieces are merged, so that a body of single bytes needs no more memory than another.
"""

from __future__ import annotations

from kvasir_platform.gateway.http.json_size import JsonSize

_PIECE_BYTES = 64 << 10
"""What is gathered up to this is not touched again before the end."""


class Body:
    """The bytes of one body, in pieces."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._size = JsonSize()

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
        self._size.add(piece, pieces)

    def take(self) -> bytes:
        """Return the whole body and clear the buffer."""
        pieces, self._pieces = self._pieces, []
        self._size = JsonSize()
        if len(pieces) == 1 and isinstance(pieces[0], bytes):
            return pieces[0]
        return b"".join(pieces)
