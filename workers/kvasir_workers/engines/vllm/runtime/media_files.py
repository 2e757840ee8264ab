"""Decodes images and audio for vLLM, and videos in a process of their own.

The files are from clients. Their headers have been checked, and what a decoder makes of them is compared with
the headers: one that has more than it says is refused.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile
import soxr
from vllm.multimodal.media import ImageMediaIO

from kvasir.core.media.audio import AudioHeader
from kvasir.core.media.videos import VideoHeader, taken_places
from kvasir_workers.videos.process import decoded

_MAX_VIDEO_S = 8
"""The longest that one video is decoded: within the limit on preparing a request."""
_SOUND_FORMATS = frozenset({"WAV", "WAVEX", "FLAC", "MP3", "MPEG"})
_MAX_SOUND_BYTES = 256 << 20
_LENIENCE_S = 0.25
"""What decoders of MP3 add or drop at the ends."""


def image(data: bytes) -> Any:
    """Return a picture. vLLM compares its dimensions with VLLM_MAX_IMAGE_PIXELS before it is decoded."""
    return ImageMediaIO().load_bytes(data)


def video(data: bytes, header: VideoHeader, frames: int) -> Any:
    """Return `frames` frames of a video, evenly spaced, as vLLM spaces them: frames x height x width x RGB,
    and what vLLM's loaders say of them. Raises ValueError if the file has not what its header says, or takes
    too long."""
    made = decoded(data, header, frames, timeout_s=_MAX_VIDEO_S)
    said = {
        "total_num_frames": header.frames,
        "fps": header.frames / header.seconds if header.seconds > 0 else 0.0,
        "duration": header.seconds,
        "video_backend": "opencv",
        "frames_indices": taken_places(header.frames, frames),
        "do_sample_frames": False,
    }
    return made, said


def audio(data: bytes, header: AudioHeader, samples: int, rate: int) -> Any:
    """Return `samples` samples of the mean of all channels, at `rate` samples a second, and the rate. Raises
    ValueError if the file has not what its header says."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.format not in _SOUND_FORMATS or file.samplerate != header.rate:
            raise ValueError("its header says something else")
        lenience = int(_LENIENCE_S * header.rate)
        most = header.samples + lenience + 1
        if 4 * file.channels * most > _MAX_SOUND_BYTES:
            raise ValueError(f"it has {file.channels} channels, and takes more than {_MAX_SOUND_BYTES} bytes")
        heard = file.read(most, dtype="float32", always_2d=True)
    if abs(len(heard) - header.samples) > lenience:
        raise ValueError(f"its header says {header.samples} samples; it has {len(heard)}")
    mono = heard.mean(axis=1)
    made = mono if header.rate == rate else soxr.resample(mono, header.rate, rate)
    fitted = np.zeros(samples, dtype=np.float32)
    fitted[: len(made)] = made[:samples]
    return fitted, rate
