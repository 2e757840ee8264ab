"""Peers from PyPI, each in its own virtual environment, which is kept after the run.

Environments are in the folder KVASIR_BENCH_CACHE, by default in the user's cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.scenarios.gateway.processes import ProcessError

_DYNAMO = (
    "aiohttp>=3.14,<4",
    "msgspec>=0.19",
    "prometheus-client>=0.23.1,<1",
    "pyzmq>=26",
    "redis>=6.2,<9",
    "tqdm>=4",
    "transformers>=4.56",
    "typing-extensions>=4.10",
    "zstandard>=0.23,<1",
    "pydantic>=2.10.6,<=2.13.5",
    "uvloop>=0.21",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments for pip: `alone` is installed without dependencies, then `more` with them."""

    alone: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The peer itself, pinned."""
        return (*self.alone, *self.more)[0]


WANTED = {
    "sglang-router": Wanted(more=("sglang-router==0.3.2",)),
    "vllm-router": Wanted(more=("vllm-router==0.1.17",)),
    # Without dependencies, because a package that only its planner uses cannot be installed everywhere.
    "ai-dynamo": Wanted(alone=("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"), more=_DYNAMO),
}


@dataclass(frozen=True, slots=True)
class Package:
    """An installed peer."""

    python: Path
    version: str


class Packages:
    """Installs the peers that are missing."""

    def __init__(self, folder: Path | None = None) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvasir-bench"
        self._folder = folder or Path(os.environ.get("KVASIR_BENCH_CACHE", home))

    def get(self, name: str) -> Package:
        """The peer of that name. Raise ProcessError with pip's output."""
        wanted = WANTED[name]
        folder = self._folder / wanted.version
        python = folder / "bin" / "python"
        if not (folder / ".complete").exists():
            sys.stderr.write(f"{wanted.version}: installing into {folder}\n")
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], wanted.version)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            if wanted.alone:
                _run([*pip, "--no-deps", *wanted.alone], wanted.version)
            _run([*pip, *wanted.more], wanted.version)
            (folder / ".complete").touch()
        return Package(python, wanted.version)


def _run(argv: Sequence[str], what: str) -> None:
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        said = " ".join(lines) or run.stderr.strip()[-300:] or "no reason given"
        raise ProcessError(f"{what} did not install: {said[:400]}")
