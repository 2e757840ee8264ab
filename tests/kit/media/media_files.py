"""Audio and video files for tests, made without a library: WAV with its samples, and the headers of MP4,
without frames."""

from __future__ import annotations

import math
import struct


def wav(seconds: float, hertz: float = 440.0, *, rate: int = 16_000, channels: int = 1) -> bytes:
    """A WAV file of one tone, of 16-bit samples."""
    count = round(seconds * rate)
    tone = (round(12_000 * math.sin(2 * math.pi * hertz * at / rate)) for at in range(count))
    data = b"".join(struct.pack("<h", each) * channels for each in tone)
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * channels * rate, 2 * channels, 16)
    body = b"WAVE" + _chunk(b"fmt ", form) + _chunk(b"LIST", b"INFO") + _chunk(b"data", data)
    return _chunk(b"RIFF", body)


def mp4(
    width: int, height: int, frames: int, *, rate: int = 25, turned: bool = False, name: bytes = b""
) -> bytes:
    """The headers of an MP4 file with a track of sound and one of a picture. `turned`: it is shown turned by
    a quarter."""
    one = 0x10000
    matrix = struct.pack(">9i", *((0, one, 0, -one, 0) if turned else (one, 0, 0, 0, one)), 0, 0, 0, 1 << 30)
    entry = bytes(24) + struct.pack(">HH", width, height) + bytes(50)
    sound = _box(b"mdia", _box(b"hdlr", bytes(8) + b"soun" + bytes(12)))
    table = _full(b"stsd", struct.pack(">I", 1) + _box(b"mp4v", entry))
    table += _full(b"stsz", struct.pack(">II", 0, frames))
    media = _full(b"mdhd", struct.pack(">IIII", 0, 0, 1000 * rate, 1000 * frames) + bytes(4))
    media += _full(b"hdlr", bytes(4) + b"vide" + bytes(12)) + _box(b"minf", _box(b"stbl", table))
    track = _full(b"tkhd", bytes(36) + matrix + struct.pack(">II", width << 16, height << 16))
    tracks = _box(b"trak", sound) + _box(b"trak", track + _box(b"mdia", media))
    return _box(b"ftyp", b"isom" + bytes(4)) + _box(b"moov", tracks) + _box(b"free", name)


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


def _full(name: bytes, body: bytes) -> bytes:
    return _box(name, bytes(4) + body)
