"""Files and the kernel's page cache: a measurement of a disk must not be one of memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_through(files: Iterable[Path]) -> None:
    """Wait until the contents of these files are on their disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def evict(files: Iterable[Path]) -> None:
    """Remove these files from the page cache. What the disk does not have yet is written first, because the
    kernel keeps it otherwise."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
