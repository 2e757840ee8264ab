"""How long the gateway's certificates are still valid.

The console reads that every second, on the loop that serves streams, so a file is parsed only after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir.wire.tls import certificates_in, read_pem

_Version = tuple[int, ...]


class CertificateExpiries:
    """The expiries of the first certificates of PEM files. `read` returns the contents of a file."""

    def __init__(self, files: Iterable[str], read: Callable[[Path], bytes] = read_pem) -> None:
        self._files = tuple(files)
        self._read = read
        self._known: dict[str, tuple[_Version, float]] = {}

    def left_s(self, wall: float) -> dict[str, float]:
        """Return the seconds for which each file is still valid at `wall` (Unix seconds)."""
        return {file: self._expires_s(file) - wall for file in self._files}

    def _expires_s(self, file: str) -> float:
        """Return Unix seconds; 0 for a file that cannot be read, as then it cannot be used either."""
        path = Path(file)
        try:
            version = _version(path)
        except OSError:
            return 0.0
        known = self._known.get(file)
        if known is None or known[0] != version:
            known = self._known[file] = version, self._parsed_s(path)
        return known[1]

    def _parsed_s(self, path: Path) -> float:
        try:
            return certificates_in(path, self._read(path))[0].not_valid_after_utc.timestamp()
        except ConfigError:
            return 0.0


def _version(path: Path) -> _Version:
    # With the time of its inode, which changes with the permissions too.
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
