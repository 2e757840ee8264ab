"""Changes files of API keys in place, for `kvasir keys`: atomically, and without losing a change of another.

Gateways read the files once a second, so that a change takes effect in all of them within two seconds.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.tenants import DEFAULT_TENANT
from kvasir.core.errors import ConfigError
from kvasir_platform.gateway.identity.keys import KeyEntry, key_line, key_text, key_texts, parse_text

_MOUNTED = "..data"
_MOUNTED_REMEDY = (
    "it is a mounted Secret, which only Kubernetes can change: put the line of `kvasir keys new` into the "
    "Secret, or remove the key's line there, as with `kubectl edit secret`"
)


class StoredKey(NamedTuple):
    """A key of a store: its SHA-256, its metadata, and where it is stored."""

    hashed: bytes
    entry: KeyEntry
    source: str


class FileKeys:
    """The files of keys that a spec names. Methods raise ConfigError for files that cannot be read or
    changed, and for lines that are none."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._file = None if spec.api_keys_file is None else Path(spec.api_keys_file)
        self._folder = None if spec.api_keys_dir is None else Path(spec.api_keys_dir)

    def keys(self) -> list[StoredKey]:
        """Return all keys, in the order of the files."""
        texts = []
        if self._file is not None and self._file.exists():
            texts.append(key_text(self._file, "gateway.api_keys_file", DEFAULT_TENANT))
        if self._folder is not None:
            texts += key_texts(self._folder)
        return [
            StoredKey(hashed, entry, text.source) for text in texts for _, hashed, entry in parse_text(text)
        ]

    def add(self, hashed: bytes, entry: KeyEntry) -> str:
        """Store a key, and return where."""
        if self._file is not None:
            path = self._file
        elif self._folder is not None:
            path = self._folder / entry.tenant
        else:
            raise ConfigError(
                "gateway: kvasir.yaml names no file of keys; set api_keys_file or api_keys_dir, name a file "
                "with --keys-file, or print a line to store yourself with `kvasir keys new`"
            )
        _change(path, lambda lines: [*lines, key_line(hashed, entry)])
        return str(path)

    def remove(self, key: StoredKey) -> None:
        """Remove a key."""
        _change(Path(key.source), lambda lines: [line for line in lines if not _of(line, key.hashed)])

    def replace(self, key: StoredKey, entry: KeyEntry) -> None:
        """Give a key other metadata."""
        made = key_line(key.hashed, entry)
        _change(Path(key.source), lambda lines: [made if _of(line, key.hashed) else line for line in lines])


def _of(line: str, hashed: bytes) -> bool:
    first, *_ = line.partition("#")[0].split() or [""]
    return first.lower() == hashed.hex()


def _change(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    # The files of a mounted Secret are links into a folder of its version, beside `..data`.
    if any((folder / _MOUNTED).is_symlink() for folder in (path.parent, path.parent.parent)):
        raise ConfigError(f"{path}: {_MOUNTED_REMEDY}")
    try:
        with _locked(path) as held:
            text = key_text(path, "keys", "").text if held else ""
            _write(path, "".join(f"{line}\n" for line in change(text.splitlines())))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be changed: {error.strerror or error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a folder's files against other commands; yield whether the file exists."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield path.exists()
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    descriptor, made = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        # A link may stand for the file, and is to stay.
        os.replace(made, path.resolve())
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
