"""Programs that tests and load tests need and pip does not install, with their Debian packages."""

from __future__ import annotations

import shutil

_PACKAGES = {
    "redis-server": "redis-server",
    "haproxy": "haproxy",
    "ip": "iproute2",
    "ss": "iproute2",
    "promtool": "prometheus",
    "prometheus": "prometheus",
}


class MissingProgramError(Exception):
    """A program is not installed. The message names its Debian package."""


def missing(name: str) -> str | None:
    """Return None if the program is installed, otherwise a message that names its Debian package."""
    return None if shutil.which(name) else f"{name} is not installed: apt install {_PACKAGES[name]}"


def program(name: str) -> str:
    """Return the path of a program. Raise MissingProgramError if it is not installed."""
    if (reason := missing(name)) is not None:
        raise MissingProgramError(reason)
    return str(shutil.which(name))
