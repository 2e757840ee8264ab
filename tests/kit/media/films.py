"""Films for tests: MP4 files with frames, which OpenCV encodes."""

from __future__ import annotations

import tempfile
from pathlib import Path

WIDTH, HEIGHT = 112, 84


def mp4_film(seed: int, *, frames: int) -> bytes:
    """An MP4 of `frames` frames at 24 a second, in each of which a stripe is elsewhere."""
    import cv2
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/film.mp4"
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(path, codec, 24.0, (WIDTH, HEIGHT))
        for number in range(frames):
            frame = np.full((HEIGHT, WIDTH, 3), seed, dtype=np.uint8)
            at = (number * 3 + seed) % WIDTH
            frame[:, at : at + 12] = (250, 2 * number % 256, 250 - seed)
            writer.write(frame)
        writer.release()
        return Path(path).read_bytes()
