"""Reads the format and the dimensions of an image from its header, without decoding it.

A file of some kilobytes can claim, or decode to, gigabytes of pixels, so that dimensions are checked before
any decoder sees the file. All reads are bounded, and nothing is allocated by what the file says.

Sources: PNG (W3C, IHDR), JPEG (ITU-T T.81, annex B), GIF89a, WebP container (RFC 9649).
"""

from __future__ import annotations

from typing import NamedTuple

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""The names that decoders use."""
_PNG = b"\x89PNG\r\n\x1a\n"
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG markers of a frame's header, which has the dimensions."""
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers without a length."""
_MAX_STEPS = 1024
"""Segments and bytes of padding before the header of a JPEG's frame."""


class ImageHeader(NamedTuple):
    """The format, one of FORMATS, and the dimensions in pixels."""

    format: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height


def image_header(data: bytes) -> ImageHeader:
    """Return the header of an image file. Raises ValueError with the reason for other formats, and for a file
    without dimensions."""
    if data.startswith(_PNG):
        return _header("PNG", _png(data))
    if data.startswith(b"\xff\xd8\xff"):
        return _header("JPEG", _jpeg(data))
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _header("GIF", _little(data, 6, 2) + _little(data, 8, 2))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _header("WEBP", _webp(data))
    raise ValueError(f"it is none of {', '.join(FORMATS)}")


def _header(form: str, found: tuple[int, ...]) -> ImageHeader:
    if len(found) != 2 or min(found) < 1:
        raise ValueError(f"its {form} header is damaged")
    return ImageHeader(form, *found)


def _png(data: bytes) -> tuple[int, ...]:
    return _big(data, 16, 4) + _big(data, 20, 4) if data[12:16] == b"IHDR" else ()


def _jpeg(data: bytes) -> tuple[int, ...]:
    """Return width and height of the first frame."""
    at = 2
    for _ in range(_MAX_STEPS):
        if len(data) < at + 4 or data[at] != 0xFF:
            return ()
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker in _FRAMES:
            return _big(data, at + 7, 2) + _big(data, at + 5, 2)
        if marker == 0xDA:
            return ()
        at += 2 if marker in _BARE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return ()


def _webp(data: bytes) -> tuple[int, ...]:
    kind = data[12:16]
    if kind == b"VP8X":
        return tuple(1 + size for size in _little(data, 24, 3) + _little(data, 27, 3))
    if kind == b"VP8L" and data[20:21] == b"\x2f":
        return tuple(1 + (bits >> shift & 0x3FFF) for bits in _little(data, 21, 4) for shift in (0, 14))
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return tuple(size & 0x3FFF for size in _little(data, 26, 2) + _little(data, 28, 2))
    return ()


def _big(data: bytes, at: int, size: int) -> tuple[int, ...]:
    return (int.from_bytes(data[at : at + size], "big"),) if len(data) >= at + size else ()


def _little(data: bytes, at: int, size: int) -> tuple[int, ...]:
    return (int.from_bytes(data[at : at + size], "little"),) if len(data) >= at + size else ()
