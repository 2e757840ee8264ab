"""Image files for tests, made without an imaging library: PNG with its pixels, and headers of other
formats."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int, height: int, colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    """A PNG of one colour."""
    rows = zlib.compressobj(9)
    row = b"\0" + bytes(colour) * width
    return _png(width, height, b"".join(rows.compress(row) for _ in range(height)) + rows.flush())


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims these dimensions, and has no pixels."""
    return _png(width, height, zlib.compress(b""))


def jpeg(width: int, height: int) -> bytes:
    """The beginning of a JPEG: comments, padding, and the header of its frame."""
    comment = b"\xff\xfe" + struct.pack(">H", 6) + b"\xff\xc0ab"
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3)
    return b"\xff\xd8" + comment + b"\xff\xff" + frame + bytes(9)


def gif(width: int, height: int) -> bytes:
    """The beginning of a GIF."""
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(3)


def webp(width: int, height: int) -> bytes:
    """The beginning of an extended WebP."""
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 30) + b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas


def data_url(data: bytes, media: str = "image/png") -> str:
    """The data URL of a file."""
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def _png(width: int, height: int, pixels: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
