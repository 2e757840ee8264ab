"""How tests and load tests install packages into an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install_locked(lock: Path, *, python: Path | str = sys.executable, target: Path | None = None) -> None:
    """Install what a lock file lists with hashes, and nothing else: into the environment of `python`, or into
    the folder `target`."""
    quiet = ["--disable-pip-version-check", "install", "-q", "--progress-bar", "off"]
    where = [] if target is None else ["--target", str(target)]
    pinned = ["--no-deps", "--require-hashes", *where, "-r", str(lock)]
    subprocess.run([str(python), "-m", "pip", *quiet, *pinned], check=True)
