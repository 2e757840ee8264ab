"""Ids of files and batches: in the order of their creation, and safe as parts of a key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from kvasir.core.errors import RequestError
from kvasir.ports.clock import Rng
from kvasir_platform.gateway.openai.schema.limits import bad

_FILE = re.compile(r"file-[0-9a-z]{24,26}")
_BATCH = re.compile(r"batch_[0-9a-f]{24}")
_MOST = {"files": 10_000, "batches": 100}
_DEFAULT = {"files": 10_000, "batches": 20}

_Item = TypeVar("_Item", bound=msgspec.Struct)


def new_key(now: float, rng: Rng) -> str:
    """Return the part of an id behind its prefix; `now` is Unix time in seconds."""
    return f"{int(now):08x}{rng.getrandbits(64):016x}"


def file_id(name: str) -> str:
    """Return the id of a file. Raise RequestError 404 for what cannot be one."""
    if _FILE.fullmatch(name) is None:
        raise no_file(name)
    return name


def batch_id(name: str) -> str:
    """Return the id of a batch. Raise RequestError 404 for what cannot be one."""
    if _BATCH.fullmatch(name) is None:
        raise no_batch(name)
    return name


def output_file(batch: str) -> str:
    """Return the id of a batch's output file: the same after a restart."""
    return f"file-{batch.removeprefix('batch_')}o"


def error_file(batch: str) -> str:
    """Return the id of a batch's error file."""
    return f"file-{batch.removeprefix('batch_')}e"


def no_file(name: str) -> RequestError:
    """Return the error for a file that is not there."""
    return RequestError(f"No such File object: {name[:64]}", status=404, code="file_not_found", param="id")


def no_batch(name: str) -> RequestError:
    """Return the error for a batch that is not there."""
    return RequestError(f"No batch found with id {name[:64]!r}.", status=404, code="batch_not_found")


class ListQuery:
    """What the query of a list asks for: `limit`, `after`, `order`, and further `fields`. Raise
    RequestError."""

    def __init__(self, query: bytes, of: str, fields: tuple[str, ...] = ()) -> None:
        given = dict(parse_qsl(query.decode("latin-1")))
        self.after = given.pop("after", "")
        self.newest_first = given.pop("order", "desc") == "desc"
        limit = given.pop("limit", str(_DEFAULT[of]))
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST[of]:
            raise bad(f"limit is a number from 1 to {_MOST[of]}.", "limit")
        self.limit = int(limit)
        self.fields = {name: given.pop(name, "") for name in fields}
        for name in given:
            raise RequestError(
                f"Unknown parameter of the query: {name[:64]!r}.", code="unknown_parameter", param=name[:64]
            )

    def of(self, ids: Sequence[str]) -> tuple[list[str], bool]:
        """Return the ids of the page, given all in the order of their creation, and whether there are
        more."""
        ordered = list(reversed(ids)) if self.newest_first else list(ids)
        begin = ordered.index(self.after) + 1 if self.after in ordered else 0
        shown = ordered[begin : begin + self.limit]
        return shown, begin + len(shown) < len(ordered)
