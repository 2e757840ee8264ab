"""Installs torchvision into a folder of its own, for tests of models whose processors need it.

The wheel of the package index is for torch's CUDA build. Beside the CPU build its operators do not load,
which torchvision allows for, except in the modules that describe these operators to torch. They are emptied.
What remains is transforms in Python, which is what processors of videos use.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.kit.suite.pip import install_locked

_ROOT = Path(__file__).resolve().parents[3]
_FOLDER = _ROOT / "build" / "torchvision"
_LOCK = _ROOT / "requirements" / "gpu.lock"
_OF_OPERATORS = ("_meta_registrations.py", "_autograd_registrations.py")


def torchvision_folder() -> Path:
    """Return a folder for PYTHONPATH, filled on first use and when the version of the lock changes. Raises
    CalledProcessError if the registry lacks it."""
    found = re.search(r"^torchvision==.*\n(?: +--hash.*\n)+", _LOCK.read_text(), re.MULTILINE)
    assert found is not None
    wanted, stamp = found[0], _FOLDER / "lock"
    if stamp.exists() and stamp.read_text() == wanted:
        return _FOLDER
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    requirements = _FOLDER / "requirements.txt"
    requirements.write_text(wanted)
    install_locked(requirements, target=_FOLDER)
    for name in _OF_OPERATORS:
        (_FOLDER / "torchvision" / name).write_text("")
    stamp.write_text(wanted)
    return _FOLDER
