"""Starts the decoder of a video.

Videos are from clients. A process for each bounds the memory and the time of its decoder, ends with it when
it crashes or hangs, and has no secrets in its environment.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import Any

import numpy as np

from kvasir.core.media.videos import VideoHeader

_DECODER = "kvasir_workers.videos.decoder"
_PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "OPENCV_LOG_LEVEL": "SILENT",
    "OPENCV_FFMPEG_LOGLEVEL": "-8",
    # Only the demuxer whose headers have been read.
    "OPENCV_FFMPEG_CAPTURE_OPTIONS": "input_format;mov",
}
"""What a decoder has in its environment beside the paths of this process."""


def decoded(data: bytes, header: VideoHeader, frames: int, *, timeout_s: int) -> np.ndarray[Any, Any]:
    """Return `frames` frames of an MP4 video, evenly spaced: frames x height x width x RGB. Raises ValueError
    with the reason if the file has not what its header says, or takes more memory or time."""
    shape = (frames, header.height, header.width, 3)
    size = frames * header.height * header.width * 3
    descriptor = os.memfd_create("kvasir-video", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        numbers = (header.width, header.height, header.frames, frames, timeout_s, descriptor)
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", _DECODER, *map(str, numbers)],
            input=data,
            env=environment | SETTINGS,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise ValueError(done.stdout.decode() or f"its decoder ended with status {done.returncode}")
        return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8).reshape(shape)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"it takes more than {timeout_s} s; send fewer or smaller frames") from error
    finally:
        os.close(descriptor)
