"""A request's body as it comes in.

Large bodies come in hundreds of pieces, and joining each to what is there would move the whole body for each
of them: an upload of a few megabytes then takes more time than all streams beside it. So pieces are kept, and
joined once. Small ones are gathered, so that a body of single bytes takes no more memory than another.
"""

from __future__ import annotations

_PIECE_BYTES = 64 << 10
"""What is gathered up to this is not touched again before the end."""


class Body:
    """The bytes of one body, in pieces."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []

    def add(self, piece: bytes) -> None:
        """Keep what came."""
        pieces = self._pieces
        last = pieces[-1] if pieces else b""
        if isinstance(last, bytearray) and len(last) < _PIECE_BYTES:
            last += piece
        elif pieces and len(piece) < _PIECE_BYTES:
            pieces.append(bytearray(piece))
        else:
            pieces.append(piece)

    def take(self) -> bytes:
        """All that came, which is then no longer kept."""
        pieces, self._pieces = self._pieces, []
        if len(pieces) == 1 and isinstance(pieces[0], bytes):
            return pieces[0]
        return b"".join(pieces)
