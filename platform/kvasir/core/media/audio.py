"""Reads the format, the rate and the length of an audio file from its headers, without decoding it.

The length decides how many tokens a model makes of the file. All reads are bounded, and nothing is allocated
by what the file says.

Sources: RIFF WAVE (Microsoft, Multimedia Programming Interface), FLAC (RFC 9639, STREAMINFO), MPEG audio
frames (ISO 11172-3 and 13818-3, layer III), ID3v2.4 (id3.org, section 3.1).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

AUDIO_FORMATS = ("WAV", "MP3", "FLAC")
_MAX_STEPS = 1024
"""Chunks before the samples of a WAV file."""
_MAX_FRAMES = 150_000
"""Frames of an MP3 file: an hour at 44.1 kHz is 137,813."""
_WAV_CODES = frozenset({0x0001, 0x0003, 0x0006, 0x0007, 0xFFFE})
"""PCM, float, A-law, mu-law, and those with a longer header."""
_MPEG_1 = 3
_BIT_RATES = {
    _MPEG_1: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {_MPEG_1: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


class AudioHeader(NamedTuple):
    """The format, one of AUDIO_FORMATS, the samples of a second, and the samples of a channel."""

    format: str
    rate: int
    samples: int

    @property
    def seconds(self) -> float:
        """The length."""
        return self.samples / self.rate

    def resampled(self, rate: int) -> int:
        """Return the samples of a channel at another rate, rounded up."""
        return -(-self.samples * rate // self.rate)


def audio_header(data: bytes) -> AudioHeader:
    """Return the header of an audio file. Raises ValueError with the reason for other formats, and for a file
    whose headers do not say how long it is."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _header("WAV", _wav(data))
    if data[:4] == b"fLaC":
        return _header("FLAC", _flac(data))
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return _header("MP3", _mp3(data))
    raise ValueError(f"it is none of {', '.join(AUDIO_FORMATS)}")


def _header(form: str, found: tuple[int, int] | None) -> AudioHeader:
    if found is None or min(found) < 1:
        raise ValueError(f"its {form} header is damaged, or says no length")
    return AudioHeader(form, *found)


def _wav(data: bytes) -> tuple[int, int] | None:
    at, rate, frame = 12, 0, 0
    for _ in range(_MAX_STEPS):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8
        if len(data) < at:
            return None
        if name == b"fmt " and size >= 16 and len(data) >= at + 16:
            code, _, rate, _, frame = struct.unpack_from("<HHIIH", data, at)
            if code not in _WAV_CODES:
                raise ValueError(f"its samples are of WAV code {code}, not PCM")
        if name == b"data":
            # A writer that streams does not know the size, and says 0 or the maximum.
            there = len(data) - at
            return (rate, min(size or there, there) // frame) if frame else None
        at += size + size % 2
    return None


def _flac(data: bytes) -> tuple[int, int] | None:
    if len(data) < 26 or data[4] & 0x7F:
        return None
    packed = int.from_bytes(data[18:26], "big")
    return packed >> 44, packed & (1 << 36) - 1


def _mp3(data: bytes) -> tuple[int, int] | None:
    """Return the rate of the first frame, and the samples of all frames before other data."""
    at = 0
    if data[:3] == b"ID3":
        if len(data) < 10 or max(data[6:10]) > 0x7F:
            return None
        size = sum(byte << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
        at = 10 + size + (10 if data[5] & 0x10 else 0)
    rate = samples = 0
    for number in range(_MAX_FRAMES + 1):
        frame = _frame(data, at)
        if frame is None or (rate and frame[0] != rate):
            return rate, samples
        if number == _MAX_FRAMES:
            raise ValueError(f"it has more than {_MAX_FRAMES} frames")
        rate, length, count = frame
        # Encoders write their name, and no sound, into a first frame.
        if samples or not any(name in data[at : at + 64] for name in (b"Xing", b"Info", b"VBRI")):
            samples += count
        at += length
    return rate, samples


def _frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Return the rate, the bytes and the samples of the layer-III frame at `at`, None if there is none."""
    if len(data) < at + 4 or data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:
        return None
    version, bits, rate = data[at + 1] >> 3 & 3, data[at + 2] >> 4, data[at + 2] >> 2 & 3
    if version not in _RATES or rate == 3 or not 0 < bits < 15:
        return None
    first = version == _MPEG_1
    hertz, kilobits = _RATES[version][rate], _BIT_RATES[_MPEG_1 if first else 2][bits - 1]
    length = (144 if first else 72) * kilobits * 1000 // hertz + (data[at + 2] >> 1 & 1)
    return hertz, length, 1152 if first else 576
