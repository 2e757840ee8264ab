"""The Python twin of the native framing of streamed pieces. `_native.pyi` has the contract."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


def frame_piece(before: bytes, text: str, after: bytes, chunked: bool) -> bytes:
    """See `_native.pyi`."""
    frame = b"%b%b%b" % (before, _encode(text), after)
    return http_chunk(frame) if chunked else frame


def http_chunk(data: bytes) -> bytes:
    """See `_native.pyi`."""
    return b"%x\r\n%b\r\n" % (len(data), data)
