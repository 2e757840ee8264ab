"""LoRA adapters that are loaded and unloaded while workers run.

A name can be given to other weights later. Everything that must not mix KV of different weights (block
hashes, tiers, transfers, the engine's cache) therefore uses an adapter's key: its name and a digest of its
files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvasir.core.errors import RequestError

SourceKind = Literal["folder", "s3", "hub"]

NAME_PATTERN = r"^[A-Za-z0-9][-A-Za-z0-9._:/@+]*$"
NAME_LIMIT = 256
SOURCE_LIMIT = 1024

_NAME = re.compile(NAME_PATTERN)
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?P<prefix>/.*)?")
_HUB_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB = re.compile(rf"{_HUB_PART}/{_HUB_PART}(@[A-Za-z0-9][A-Za-z0-9._/-]*)?")
_OWNER = re.compile(rf"{_HUB_PART}/")
_FORMS = "an absolute folder, s3://BUCKET/PREFIX, or a Hugging Face id OWNER/NAME or OWNER/NAME@REVISION"


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter that a worker holds. `source` is where it was loaded from, `replicas` how many workers of
    each pool should hold it (0: all), `digest` identifies its files, `nbytes` is their size. `retiring`: it
    takes no further requests, and is removed when those that run have ended."""

    name: str
    source: str
    replicas: int
    digest: str
    rank: int
    nbytes: int
    retiring: bool = False

    @property
    def key(self) -> str:
        """The adapter's name within the deployment, which no other weights have."""
        return f"{self.name}@{self.digest}"


def name_problem(name: str) -> str | None:
    """Return why `name` cannot be the name of an adapter, or None."""
    if len(name) > NAME_LIMIT or not _NAME.fullmatch(name):
        return (
            f"{name[:64]!r} is no valid name: it begins with a letter or digit, has at most {NAME_LIMIT} "
            "characters, and these are letters, digits and - . _ : / @ +"
        )
    return None


def source_kind(source: str) -> SourceKind:
    """Return what kind of source it is. Raise ValueError, which says what is valid."""
    if len(source) > SOURCE_LIMIT or not source.isprintable():
        raise ValueError(f"at most {SOURCE_LIMIT} printable characters are valid: {_FORMS}")
    if any(part in (".", "..") for part in source.split("/")):
        raise ValueError(f"{source!r} has a part `.` or `..`; write the path without it")
    if source.startswith("/"):
        return "folder"
    if source.startswith("s3://"):
        if _S3.fullmatch(source) is None:
            raise ValueError(f"{source!r} is no valid S3 address; write s3://BUCKET/PREFIX")
        return "s3"
    if _HUB.fullmatch(source) is None:
        raise ValueError(f"{source!r} is none of: {_FORMS}")
    return "hub"


def check_name(name: str) -> None:
    """Raise RequestError (invalid_value) unless `name` can be the name of an adapter."""
    if problem := name_problem(name):
        raise RequestError(f"lora_name: {problem}.", code="invalid_value", param="lora_name")


def check_source(patterns: Iterable[str], source: str) -> SourceKind:
    """Return what kind of source it is. Raise RequestError if it is none (invalid_value), or if the
    allow-list does not cover it (adapter_source_not_allowed)."""
    try:
        kind = source_kind(source)
    except ValueError as error:
        raise RequestError(f"lora_path: {error}.", code="invalid_value", param="lora_path") from error
    if not allows(patterns, source):
        raise source_not_allowed(source)
    return kind


def source_not_allowed(source: str) -> RequestError:
    """Return the error for a source that the allow-list does not cover."""
    return RequestError(
        f"Loading from {source[:256]!r} is not allowed; add it, or a prefix of it, to lora_loading.allow in "
        "kvasir.yaml.",
        status=403,
        code="adapter_source_not_allowed",
        param="lora_path",
    )


def pattern_problem(pattern: str) -> str | None:
    """Return why an entry of an allow-list is invalid, or None."""
    if _OWNER.fullmatch(pattern):
        return None
    try:
        source_kind(pattern)
    except ValueError as error:
        return f"{error}; an entry may also be OWNER/, for all repositories of that owner"
    return None


def allows(patterns: Iterable[str], source: str) -> bool:
    """Whether a valid `source` is equal to an entry, or below one that is a folder, an S3 prefix or an
    owner. A revision is part of the source: an entry without one allows all of them."""
    return any(_covers(pattern, source) for pattern in patterns)


def _covers(pattern: str, source: str) -> bool:
    kind = source_kind(source)
    if _OWNER.fullmatch(pattern):
        return kind == "hub" and source.startswith(pattern)
    if kind == "hub":
        return pattern in (source, source.partition("@")[0])
    plain, within = _plain(source), _plain(pattern)
    return plain == within or plain.startswith(within.rstrip("/") + "/")


def _plain(source: str) -> str:
    """Return it without repeated and trailing slashes."""
    scheme, separator, rest = source.rpartition("://")
    return scheme + separator + posixpath.normpath(rest)
