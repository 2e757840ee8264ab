"""API keys: their tenant, expiry and scopes, by their hashes, since only hashes are stored.

A key has 256 random bits, so that its plain SHA-256 reveals nothing and costs a microsecond per request.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.tenants import ALL_SCOPES, DEFAULT_TENANT, Scope
from kvasir.core.errors import ConfigError
from kvasir_platform.gateway.identity.identities import SCOPES, Identity

PREFIX = "sk-kvasir-"
"""Prefix of generated keys, so that scanners for leaked secrets recognize them."""
_HASH = re.compile(r"[0-9a-fA-F]{64}")
MAX_KEYS = 100_000
_MAX_BYTES = 32 << 20
_MAX_FILES = 1000
_ID_DIGITS = 12
_MAX_FIELD_CHARS = 128
_FIELDS = frozenset(("tenant", "expires", "created", "scopes"))
_EXPECTED = (
    "expected the SHA-256 of a key (64 hexadecimal digits), then tenant=NAME, expires=2030-01-31T00:00:00Z, "
    f"created= with such a time, and scopes= with some of {'+'.join(SCOPES)}, where they apply"
)


class KeyEntry(NamedTuple):
    """The metadata of a key. `expires_s` is in Unix seconds, infinite for never; `created_s` is None where
    the line does not say it."""

    tenant: str
    expires_s: float = float("inf")
    scopes: frozenset[Scope] = ALL_SCOPES
    created_s: float | None = None

    @property
    def identity(self) -> Identity:
        """Whose the key is."""
        return Identity(self.tenant, self.expires_s, self.scopes)


class KeyText(NamedTuple):
    """One source as read: its name, the tenant of lines that name none, and its lines."""

    source: str
    tenant: str
    text: str


def new_key() -> str:
    """Return a random key of 256 bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> bytes:
    """Return the SHA-256 of a key, by which it is stored."""
    return hashlib.sha256(key.encode()).digest()


def key_id(hashed: bytes) -> str:
    """Return the name of the key with this SHA-256: the begin of it."""
    return hashed.hex()[:_ID_DIGITS]


def key_line(hashed: bytes, entry: KeyEntry) -> str:
    """Return the line to store for the key with this SHA-256."""
    fields = [hashed.hex(), f"tenant={entry.tenant}"]
    if entry.scopes != ALL_SCOPES:
        fields.append(f"scopes={'+'.join(sorted(entry.scopes))}")
    if entry.created_s is not None:
        fields.append(f"created={time_text(entry.created_s)}")
    if entry.expires_s != float("inf"):
        fields.append(f"expires={time_text(entry.expires_s)}")
    return " ".join(fields)


def time_text(moment_s: float) -> str:
    """Return a Unix time as lines have it, in UTC."""
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_sources(gateway: GatewaySpec, environment: Mapping[str, str]) -> list[KeyText]:
    """Return the texts of all sources in the spec. Raise ConfigError naming the source that fails."""
    texts = []
    if gateway.api_keys_file is not None:
        texts.append(key_text(Path(gateway.api_keys_file), "gateway.api_keys_file", DEFAULT_TENANT))
    if gateway.api_keys_dir is not None:
        texts += key_texts(Path(gateway.api_keys_dir))
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
        for where, hashed, known in parse_text(text):
            if known.tenant not in tenants:
                raise ConfigError(
                    f"{where}: tenancy.tenants has no {known.tenant!r}; list the tenant or correct the name"
                )
            if keys.setdefault(hashed, known) != known:
                raise ConfigError(f"{where}: duplicate key with another tenant, expiry or scopes")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"more than {MAX_KEYS} API keys")
    return keys


def parse_text(text: KeyText) -> Iterator[tuple[str, bytes, KeyEntry]]:
    """Yield source and line, SHA-256 and metadata of each key of a source. Raise ConfigError as
    `parse_keys`."""
    for number, line in enumerate(text.text.splitlines(), 1):
        where = f"{text.source}:{number}"
        parsed = _parse_line(line, where, text.tenant)
        if parsed is not None:
            yield where, *parsed


def _parse_line(line: str, where: str, tenant: str) -> tuple[bytes, KeyEntry] | None:
    """Return the SHA-256 and metadata of the key in a line, None if it has none. `tenant` is that of lines
    that name none. Raise ConfigError that says `where`, without the content."""
    first, *rest = line.partition("#")[0].split() or [""]
    if not first:
        return None
    if not _HASH.fullmatch(first):
        raise ConfigError(f"{where}: {_EXPECTED}")
    fields: dict[str, str] = {}
    for field in rest:
        name, _, value = field.partition("=")
        if name in fields or name not in _FIELDS or not 0 < len(value) <= _MAX_FIELD_CHARS:
            raise ConfigError(f"{where}: {_EXPECTED}")
        fields[name] = value
    expires = fields.get("expires")
    created = fields.get("created")
    return bytes.fromhex(first), KeyEntry(
        fields.get("tenant", tenant),
        float("inf") if expires is None else _moment(expires, where),
        _scopes(fields.get("scopes"), where),
        None if created is None else _moment(created, where),
    )


def _scopes(text: str | None, where: str) -> frozenset[Scope]:
    if text is None:
        return ALL_SCOPES
    names = text.split("+")
    if any(name not in SCOPES for name in names):
        raise ConfigError(f"{where}: {_EXPECTED}")
    return frozenset(SCOPES[name] for name in names)


def _moment(text: str, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: {_EXPECTED}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"{where}: a time needs its zone, as in 2030-01-31T00:00:00Z")
    return moment.timestamp()


def key_texts(folder: Path) -> list[KeyText]:
    """Return the texts of all files in a folder, of one version of a mounted Secret. Raise ConfigError."""
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
    return [key_text(base / name, "gateway.api_keys_dir", name) for name in names]


def key_text(path: Path, field: str, tenant: str) -> KeyText:
    """Return the text of a file. Raise ConfigError naming the field."""
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
