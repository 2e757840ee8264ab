"""What workers decode of real MP4 files: the frames that vLLM's loaders take, and reasons for files that have
not what their headers say."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.media.films import HEIGHT, WIDTH, mp4_film

from kvasir.core.media.videos import VideoHeader, taken_places, video_header

cv2: Any = pytest.importorskip("cv2")
from kvasir_workers.videos import decoder, process  # noqa: E402 - imports OpenCV

FRAMES = 48
QUARTER = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 1 << 30)
UPRIGHT = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 1 << 30)
FILM = mp4_film(10, frames=FRAMES)


def taken(data: bytes, frames: int, header: VideoHeader | None = None) -> np.ndarray[Any, Any]:
    return process.decoded(data, header or video_header(data), frames, timeout_s=8)


def all_frames(data: bytes) -> np.ndarray[Any, Any]:
    """All frames, by OpenCV alone."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        path.write_bytes(data)
        capture = cv2.VideoCapture(str(path))
        while (read := capture.read())[0]:
            found.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    return np.stack(found)


def without_end(data: bytes) -> bytes:
    """A film whose later frames are zeros."""
    at = data.index(b"mdat") + 4
    end = at - 8 + int.from_bytes(data[at - 8 : at - 4], "big")
    half = (at + end) // 2
    return data[:half] + bytes(end - half) + data[end:]


@pytest.mark.parametrize("frames", [1, 7, FRAMES])
def test_evenly_spaced_frames_are_taken(frames: int) -> None:
    whole = all_frames(FILM)
    assert whole.shape == (FRAMES, HEIGHT, WIDTH, 3)
    made = taken(FILM, frames)
    assert made.flags.writeable
    assert np.array_equal(made, whole[taken_places(FRAMES, frames)])


def test_the_places_of_frames_are_those_of_numpy() -> None:
    for total in range(1, 400):
        for frames in range(1, min(total, 40) + 1):
            assert taken_places(total, frames) == np.linspace(0, total - 1, frames, dtype=int).tolist()


def test_a_film_that_is_shown_turned_is_decoded_as_it_is_shown() -> None:
    # The matrix of the track; that of the whole film is before it.
    before, _, after = FILM.rpartition(UPRIGHT)
    turned = before + QUARTER + after
    made = taken(turned, 3)
    assert made.shape == (3, WIDTH, HEIGHT, 3)
    assert np.array_equal(made, all_frames(turned)[taken_places(FRAMES, 3)])


def test_a_film_that_has_not_what_its_header_says_is_refused() -> None:
    wide, short = struct.pack(">HH", WIDTH, HEIGHT), struct.pack(">HH", WIDTH - 14, HEIGHT)
    assert wide in FILM
    lying = FILM.replace(wide, short)
    with pytest.raises(ValueError, match=f"its frames are not the {WIDTH - 14} x {HEIGHT} of its header"):
        taken(lying, 4)
    with pytest.raises(ValueError, match="its header says 48 frames of 112 x 84; no more than"):
        taken(without_end(FILM), 4)
    with pytest.raises(ValueError, match="no stream that can be decoded"):
        taken(b"\0\0\0\x08ftyp" + bytes(64), 4, VideoHeader(WIDTH, HEIGHT, FRAMES, 2.0))


@pytest.mark.parametrize(("wanted", "there"), [(100, True), (300, False)])
def test_a_decoder_has_memory_for_the_frames_of_its_header_and_no_more(wanted: int, there: bool) -> None:
    assert 256 << 20 < decoder.memory_bound(WIDTH, HEIGHT) < 300 << 20
    then = f"""
import sys
from kvasir_workers.videos import decoder
assert decoder.main(sys.argv[1:]) == 1
bytearray({wanted} << 20)
"""
    with tempfile.TemporaryFile() as frames:
        frames.truncate(3 * WIDTH * HEIGHT)
        numbers = (WIDTH, HEIGHT, 1, 1, 8, frames.fileno())
        done = subprocess.run(
            [sys.executable, "-c", then, *map(str, numbers)],
            input=b"",
            env={**os.environ, **process.SETTINGS},
            capture_output=True,
            pass_fds=(frames.fileno(),),
            check=False,
        )
    assert (done.returncode == 0) is there
    assert (b"MemoryError" in done.stderr) is not there


def test_a_decoder_that_does_not_end_is_ended() -> None:
    with pytest.raises(ValueError, match="it takes more than 0 s; send fewer or smaller frames"):
        process.decoded(FILM, video_header(FILM), 4, timeout_s=0)
