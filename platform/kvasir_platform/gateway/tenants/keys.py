"""API keys: their tenant and expiry, by their hashes, since only hashes are stored.

A key has 256 random bits, so that its plain SHA-256 reveals nothing and costs a microsecond per request.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.tenants import DEFAULT_TENANT
from kvasir.core.errors import ConfigError

PREFIX = "sk-kvasir-"
"""Prefix of generated keys, so that scanners for leaked secrets recognize them."""
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_MAX_KEYS = 100_000
_MAX_BYTES = 32 << 20
_MAX_FILES = 1000
_EXPECTED = (
    "expected the SHA-256 of a key (64 hexadecimal digits), then tenant=NAME and "
    "expires=2030-01-31T00:00:00Z where they apply"
)


class KeyEntry(NamedTuple):
    """The metadata of a key. `expires_s` is in Unix seconds, infinite for never."""

    tenant: str
    expires_s: float


class KeyText(NamedTuple):
    """One source as read: its name, the tenant of lines that name none, and its lines."""

    source: str
    tenant: str
    text: str


def new_key() -> str:
    """Return a random key of 256 bits."""
    return PREFIX + secrets.token_urlsafe(32)


def key_line(key: str, tenant: str, expires: datetime | None = None) -> str:
    """Return the line to store for a key. `expires` must have a time zone."""
    line = f"{hashlib.sha256(key.encode()).hexdigest()} tenant={tenant}"
    if expires is None:
        return line
    return f"{line} expires={expires.astimezone(UTC).isoformat(timespec='seconds').replace('+00:00', 'Z')}"


def read_sources(gateway: GatewaySpec, environment: Mapping[str, str]) -> list[KeyText]:
    """Return the texts of all sources in the spec. Raise ConfigError naming the source that fails."""
    texts = []
    if gateway.api_keys_file is not None:
        texts.append(_text(Path(gateway.api_keys_file), "gateway.api_keys_file", DEFAULT_TENANT))
    if gateway.api_keys_dir is not None:
        texts += _folder(Path(gateway.api_keys_dir))
    if gateway.api_keys_env is not None:
        value = environment.get(gateway.api_keys_env)
        if value is None:
            raise ConfigError(
                f"gateway.api_keys_env: the environment variable {gateway.api_keys_env} is not set"
            )
        texts.append(KeyText(gateway.api_keys_env, DEFAULT_TENANT, value.replace(",", "\n")))
    return texts


def parse_keys(texts: Iterable[KeyText], tenants: Container[str]) -> dict[bytes, KeyEntry]:
    """Return the SHA-256 and metadata of every key. Raise ConfigError naming source and line, without their
    content."""
    keys: dict[bytes, KeyEntry] = {}
    for text in texts:
        for number, line in enumerate(text.text.splitlines(), 1):
            entry = line.partition("#")[0].split()
            if not entry:
                continue
            where = f"{text.source}:{number}"
            hashed, known = _parsed(entry, where, text.tenant)
            if known.tenant not in tenants:
                raise ConfigError(
                    f"{where}: tenancy.tenants has no {known.tenant!r}; list the tenant or correct the name"
                )
            if keys.setdefault(hashed, known) != known:
                raise ConfigError(f"{where}: duplicate key with another tenant or expiry")
    if len(keys) > _MAX_KEYS:
        raise ConfigError(f"more than {_MAX_KEYS} API keys")
    return keys


def _parsed(entry: list[str], where: str, tenant: str) -> tuple[bytes, KeyEntry]:
    if not _HASH.fullmatch(entry[0]):
        raise ConfigError(f"{where}: {_EXPECTED}")
    expires_s = float("inf")
    seen = set()
    for field in entry[1:]:
        name, _, value = field.partition("=")
        if name in seen or not value or len(value) > 64:
            raise ConfigError(f"{where}: {_EXPECTED}")
        seen.add(name)
        if name == "tenant":
            tenant = value
        elif name == "expires":
            expires_s = _moment(value, where)
        else:
            raise ConfigError(f"{where}: {_EXPECTED}")
    return bytes.fromhex(entry[0]), KeyEntry(tenant, expires_s)


def _moment(text: str, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: {_EXPECTED}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"{where}: expires needs a time zone, as in 2030-01-31T00:00:00Z")
    return moment.timestamp()


def _folder(folder: Path) -> list[KeyText]:
    base = _version(folder)
    try:
        return _files(base)
    except ConfigError:
        # The file may have been replaced while it was read.
        if (now := _version(folder)) == base:
            raise
        return _files(now)


def _version(folder: Path) -> Path:
    """Resolve the folder of a mounted Secret: its files are links into `..data`, a link that is replaced
    atomically, so that all files below its target are of one version."""
    swapped = folder / "..data"
    try:
        return swapped.resolve(strict=True) if swapped.is_symlink() else folder
    except OSError as error:
        raise ConfigError(f"gateway.api_keys_dir {folder}: {error.strerror}") from error


def _files(base: Path) -> list[KeyText]:
    try:
        names = sorted(entry.name for entry in base.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"gateway.api_keys_dir {base}: {error.strerror}") from error
    if len(names) > _MAX_FILES:
        raise ConfigError(f"gateway.api_keys_dir {base}: more than {_MAX_FILES} files")
    return [_text(base / name, "gateway.api_keys_dir", name) for name in names]


def _text(path: Path, field: str, tenant: str) -> KeyText:
    try:
        with open(path, "rb", opener=_without_waiting) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ConfigError(f"{field} {path}: not a regular file")
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{field} {path}: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{field} {path}: more than {_MAX_BYTES} bytes")
    try:
        return KeyText(str(path), tenant, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field} {path}: not UTF-8 at byte {error.start}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open without blocking: a pipe without a writer would block its reader forever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
