"""`kvasir keys`: creates, lists, rotates and revokes API keys, of which gateways store hashes only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from kvasir.config.spec.tenants import ALL_SCOPES, Scope
from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.output import CommandOutput, table
from kvasir_platform.gateway.identity.identities import SCOPES
from kvasir_platform.gateway.identity.key_files import StoredKey
from kvasir_platform.gateway.identity.keys import KeyEntry, hash_of, key_id, key_line, new_key, time_text

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_ID = re.compile(r"[0-9a-f]{6,64}")
_MAX_DAYS = 36_500
_DAY_S = 86_400.0
_HEAD = ("ID", "TENANT", "SCOPES", "CREATED", "EXPIRES", "STATE", "STORED IN")


class KeyStore(Protocol):
    """Where keys are stored. Methods raise ConfigError."""

    def keys(self) -> list[StoredKey]: ...

    def add(self, hashed: bytes, entry: KeyEntry) -> str: ...

    def remove(self, key: StoredKey) -> None: ...

    def replace(self, key: StoredKey, entry: KeyEntry) -> None: ...


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a new key is to be. `days` None is without end."""

    tenant: str = "default"
    days: int | None = None
    scopes: tuple[str, ...] = ()

    def entry(self, now: datetime) -> KeyEntry:
        """Return its metadata. Raise ConfigError for an invalid tenant, lifetime or scope."""
        if not _NAME.fullmatch(self.tenant) or len(self.tenant) > 40:
            raise ConfigError(
                f"--tenant {self.tenant[:64]!r}: expected lower-case letters, digits and -, 40 at most"
            )
        now_s = float(int(now.timestamp()))
        return KeyEntry(self.tenant, _expiry(self.days, now_s), _scopes(self.scopes), now_s)


def keys_new(wanted: NewKey, output: CommandOutput, now: datetime) -> int:
    """Print a new key and its line, which is stored nowhere."""
    key, hashed = _made()
    line = key_line(hashed, wanted.entry(now))
    output.text(f"key   {key}")
    output.text(f"line  {line}")
    output.text()
    output.text("Give the key to the client: it is shown this once. Put the line into what")
    output.text("gateway.api_keys_file, api_keys_dir or api_keys_env names.")
    output.data({"key": key, "line": line})
    return 0


def keys_create(
    wanted: NewKey, store: KeyStore, tenants: frozenset[str], output: CommandOutput, now: datetime
) -> int:
    """Store a new key, and print it."""
    entry = wanted.entry(now)
    if entry.tenant not in tenants:
        raise ConfigError(
            f"--tenant {entry.tenant}: tenancy.tenants of kvasir.yaml has no such tenant; list it first"
        )
    key, hashed = _made()
    where = store.add(hashed, entry)
    _print_key(key, hashed, entry, where, output)
    return 0


def keys_list(store: KeyStore, output: CommandOutput, now: datetime) -> int:
    """Print all keys, without the keys themselves."""
    found = sorted(store.keys(), key=lambda key: (key.entry.tenant, key.entry.expires_s, key.hashed))
    now_s = now.timestamp()
    output.data(
        [_data(key.hashed, key.entry, key.source) | {"state": _state(key.entry, now_s)} for key in found]
    )
    if found:
        output.text(table(_HEAD, [_row(key, now_s) for key in found]))
    else:
        output.text("there are no keys; create one with: kvasir keys create --tenant NAME")
    return 0


def keys_revoke(named: Sequence[str], store: KeyStore, output: CommandOutput) -> int:
    """Remove keys. Nothing is removed if one of them is unknown."""
    stored = store.keys()
    found = [_named(each, stored) for each in named]
    for key in found:
        store.remove(key)
        output.text(
            f"{key_id(key.hashed)} of tenant {key.entry.tenant} is revoked, within two seconds everywhere"
        )
    output.data([_data(key.hashed, key.entry, key.source) for key in found])
    return 0


@dataclass(frozen=True, slots=True)
class Rotation:
    """The key to replace, how long it stays valid, and the lifetime of its successor, None for the same."""

    named: str
    overlap_s: float
    days: int | None = None


def keys_rotate(wanted: Rotation, store: KeyStore, output: CommandOutput, now: datetime) -> int:
    """Store the successor of a key, of the same tenant and scopes, and let the key expire."""
    old = _named(wanted.named, store.keys())
    now_s = float(int(now.timestamp()))
    expires_s = _expiry(wanted.days, now_s)
    if wanted.days is None and old.entry.expires_s != float("inf"):
        if old.entry.created_s is None:
            raise ConfigError(
                f"the line of key {key_id(old.hashed)} says nothing of its lifetime, without created=; "
                "give that of its successor with --days"
            )
        expires_s = now_s + (old.entry.expires_s - old.entry.created_s)
    entry = old.entry._replace(expires_s=expires_s, created_s=now_s)
    until_s = min(old.entry.expires_s, now_s + wanted.overlap_s)
    key, hashed = _made()
    where = store.add(hashed, entry)
    store.replace(old, old.entry._replace(expires_s=until_s))
    _print_key(key, hashed, entry, where, output, replaces=key_id(old.hashed), until=_time(until_s))
    return 0


def _made() -> tuple[str, bytes]:
    key = new_key()
    return key, hash_of(key)


def _print_key(
    key: str, hashed: bytes, entry: KeyEntry, where: str, output: CommandOutput, **more: str
) -> None:
    output.text(f"key   {key}")
    output.text(
        f"id    {key_id(hashed)}, of tenant {entry.tenant}, expires {_time(entry.expires_s)}, in {where}"
    )
    if more:
        output.text(f"      {more['replaces']}, which it replaces, expires {more['until']}")
    output.text()
    output.text("Give the key to the client: it is shown this once. It is accepted within two seconds.")
    output.data({"key": key} | _data(hashed, entry, where) | more)


def _named(named: str, keys: list[StoredKey]) -> StoredKey:
    """Return the key with this id, or the beginning of its hash. Raise ConfigError."""
    if not _ID.fullmatch(named.lower()):
        raise ConfigError(f"{named[:64]!r} is no id of a key; `kvasir keys list` shows them")
    found = [key for key in keys if key.hashed.hex().startswith(named.lower())]
    if not found:
        raise ConfigError(f"there is no key {named}; `kvasir keys list` shows them")
    if len({key.hashed for key in found}) > 1:
        raise ConfigError(f"{named} is the beginning of several ids; write more of it")
    return found[0]


def _expiry(days: int | None, now_s: float) -> float:
    if days is None:
        return float("inf")
    if not 1 <= days <= _MAX_DAYS:
        raise ConfigError(f"--days {days}: expected 1 to {_MAX_DAYS}")
    return now_s + days * _DAY_S


def _scopes(names: tuple[str, ...]) -> frozenset[Scope]:
    for name in names:
        if name not in SCOPES:
            raise ConfigError(f"--scopes {name[:64]!r}: expected some of {', '.join(SCOPES)}")
    return frozenset(SCOPES[name] for name in names) or ALL_SCOPES


def _time(moment_s: float) -> str:
    return "never" if moment_s == float("inf") else time_text(moment_s)


def _state(entry: KeyEntry, now_s: float) -> str:
    return "expired" if entry.expires_s <= now_s else "active"


def _row(key: StoredKey, now_s: float) -> tuple[str, ...]:
    entry = key.entry
    return (
        key_id(key.hashed),
        entry.tenant,
        "all" if entry.scopes == ALL_SCOPES else ",".join(sorted(entry.scopes)),
        "-" if entry.created_s is None else _time(entry.created_s),
        _time(entry.expires_s),
        _state(entry, now_s),
        key.source,
    )


def _data(hashed: bytes, entry: KeyEntry, source: str) -> dict[str, object]:
    return {
        "id": key_id(hashed),
        "tenant": entry.tenant,
        "scopes": sorted(entry.scopes),
        "created": None if entry.created_s is None else _time(entry.created_s),
        "expires": None if entry.expires_s == float("inf") else _time(entry.expires_s),
        "source": source,
    }
