"""The process that decodes one video: it bounds its own memory and time, and has nothing but the file.

What a decoder allocates depends on the stream and not on the headers of the file, which are all that a router
reads. Beyond the bound an allocation fails, and with it the decoding.

    python -m kvasir_workers.videos.decoder WIDTH HEIGHT TOTAL FRAMES SECONDS DESCRIPTOR < FILE

It writes the frames into the memory of the descriptor, and the reason to stdout if it ends with status 1.
"""

from __future__ import annotations

import io
import mmap
import resource
import sys
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from kvasir.core.media.videos import taken_places

THREADS = 4
_OWN_BYTES = 256 << 20
_HELD_FRAMES = 32
"""Frames that decoders hold: 16 of references (H.264, annex A), and one or more for each thread and for the
conversion to RGB."""
_PIXEL_BYTES = 6
"""The most that a pixel takes: three samples of up to 16 bits."""


def memory_bound(width: int, height: int) -> int:
    """Return the bytes that a decoder of frames of that size in pixels may have, of heap, stacks and other
    memory that is not a file's."""
    return _OWN_BYTES + _HELD_FRAMES * _PIXEL_BYTES * width * height


def decode(data: bytes, made: np.ndarray[Any, Any], total: int) -> None:
    """Fill `made`, frames x height x width x RGB, with frames of a video that are evenly spaced over its
    `total` frames. Raises ValueError if the file has not what its header says."""
    size = f"{made.shape[2]} x {made.shape[1]}"
    # Never released: OpenCV 5.0 drops the file without the interpreter's lock, which ends the process.
    file: Any = io.BytesIO(data)
    capture = cv2.VideoCapture(file, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, THREADS])
    if not capture.isOpened():
        raise ValueError("it has no stream that can be decoded")
    at = -1
    for number, place in enumerate(taken_places(total, len(made))):
        while at < place:
            if not capture.grab():
                raise ValueError(
                    f"its header says {total} frames of {size}; no more than {at + 1} can be decoded"
                )
            at += 1
        there, frame = capture.retrieve()
        if not there or frame.shape != made.shape[1:]:
            raise ValueError(f"its frames are not the {size} of its header")
        made[number] = frame[:, :, ::-1]


def main(arguments: Sequence[str]) -> int:
    """Decode, as the module says. Return the exit status."""
    width, height, total, frames, seconds, descriptor = map(int, arguments)
    most = memory_bound(width, height)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (THREADS * seconds, THREADS * seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = mmap.mmap(descriptor, frames * height * width * 3)
    made = np.frombuffer(memory, dtype=np.uint8).reshape(frames, height, width, 3)
    try:
        decode(sys.stdin.buffer.read(), made, total)
    except ValueError as error:
        sys.stdout.write(str(error))
        return 1
    except (cv2.error, MemoryError):
        sys.stdout.write("its frames take more memory than those of its header")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
