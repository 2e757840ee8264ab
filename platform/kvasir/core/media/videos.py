"""Reads dimensions, frames and length of a video from the headers of its file, without decoding it.

These decide how many tokens a model makes of the video. All reads are bounded, and nothing is allocated by
what the file says.

Source: ISO 14496-12, the container of MP4 and QuickTime: boxes moov, trak, tkhd, mdhd, hdlr, stsd, stsz.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MAX_BOXES = 4096
"""Boxes that are looked at in a file."""
_INSIDE = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl"})
_MAX_RATE = 240
"""Frames of a second, on average."""


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Width and height of a frame in pixels, as it is shown, the number of frames, and the length."""

    width: int
    height: int
    frames: int
    seconds: float

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height


def video_header(data: bytes) -> VideoHeader:
    """Return the header of a video file. Raises ValueError with the reason for other formats than MP4, and
    for a file whose headers do not say what is in it."""
    if data[4:8] != b"ftyp":
        raise ValueError("it is not MP4")
    found = _Track()
    for name, at, end in _boxes(data):
        if name == b"trak":
            if found.whole:
                break
            found = _Track()
        found.see(name, data[at:end] if end - at < 1 << 12 else data[at : at + (1 << 12)])
    if not found.whole:
        raise ValueError("its MP4 header has no video track, or is damaged")
    if not found.frames:
        raise ValueError("its MP4 header does not say how many frames it has, as in a file of fragments")
    header = found.header()
    if header.frames > _MAX_RATE * max(1.0, header.seconds):
        raise ValueError(f"it has more than {_MAX_RATE} frames a second")
    return header


def taken_frames(frames: int, most: int) -> int:
    """Return how many of the frames of a video are taken."""
    return min(frames, most)


def taken_places(total: int, frames: int) -> list[int]:
    """Return which of `total` frames are taken: the first, the last and as many between, evenly spaced, with
    the rounding of numpy.linspace, which vLLM's loaders use."""
    step = (total - 1) / max(1, frames - 1)
    return [*(int(number * step) for number in range(frames - 1)), total - 1 if frames > 1 else 0]


class _Track:
    """What is known of one track."""

    def __init__(self) -> None:
        self.video = self.turned = False
        self.frames: int | None = None
        self._size = (0, 0)
        self._scale = self._length = 0

    @property
    def whole(self) -> bool:
        return self.video and self.frames is not None and min(self._size) > 0 and self._scale > 0

    def see(self, name: bytes, body: bytes) -> None:
        """Note what a box says; one that is cut off says nothing."""
        long = body[:1] == b"\x01"
        if name == b"tkhd":
            # The matrix of a picture that is turned by a quarter has no first element.
            matrix = body[52 if long else 40 :][:16]
            self.turned = len(matrix) == 16 and not any(matrix[:4]) and any(matrix[4:8])
        elif name == b"mdhd":
            at, size = (20, 8) if long else (12, 4)
            self._scale = int.from_bytes(body[at : at + 4], "big")
            self._length = int.from_bytes(body[at + 4 : at + 4 + size], "big")
        elif name == b"hdlr":
            self.video = body[8:12] == b"vide"
        elif name == b"stsd" and len(body) >= 44:
            self._size = int.from_bytes(body[40:42], "big"), int.from_bytes(body[42:44], "big")
        elif name == b"stsz" and len(body) >= 12:
            self.frames = int.from_bytes(body[8:12], "big")

    def header(self) -> VideoHeader:
        width, height = self._size[::-1] if self.turned else self._size
        return VideoHeader(width, height, self.frames or 0, self._length / self._scale)


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each box and the place of its body, also inside the boxes that lead to tracks."""
    at, ends = 0, [len(data)]
    for _ in range(_MAX_BOXES):
        while len(ends) > 1 and at >= ends[-1]:
            ends.pop()
        if at + 8 > ends[-1]:
            return
        size, name, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        end = ends[-1] if size == 0 else at + size
        if end > ends[-1] or end < at + head:
            return
        yield name, at + head, end
        if name in _INSIDE:
            ends.append(end)
            at += head
        else:
            at = end
