"""Ids of files and batches: in the order of their creation, and safe as parts of a key."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

from kvasir.core.errors import RequestError
from kvasir.ports.clock import Rng
from kvasir_platform.gateway.openai.schema.page_query import PageQuery

_FILE = re.compile(r"file-[0-9a-z]{24,26}")
_BATCH = re.compile(r"batch_[0-9a-f]{24}")


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


def created_s(batch: str) -> int:
    """Return the Unix time at which a batch was created, from its id."""
    return int(batch.removeprefix("batch_")[:8], 16)


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


class ListQuery(PageQuery):
    """A page of ids, which are in the order of their creation. `fields` are the further ones that the list
    takes; `valid` raises for an `after` that cannot be an id. Raise RequestError."""

    def __init__(
        self,
        query: bytes,
        valid: Callable[[str], object],
        *,
        default: int,
        most: int,
        fields: tuple[str, ...] = (),
    ) -> None:
        super().__init__(query, default=default, most=most)
        for name in self.further.keys() - set(fields):
            raise RequestError(
                f"Unknown parameter of the query: {name[:64]!r}.", code="unknown_parameter", param=name[:64]
            )
        if self.after:
            valid(self.after)

    def of(self, ids: Iterable[str]) -> tuple[list[str], bool]:
        """Return the ids of the page, given all, and whether there are more. The item `after` may have been
        deleted since its page."""
        ordered = sorted(ids, reverse=self.newest_first)
        if self.after:
            follows = operator.lt if self.newest_first else operator.gt
            ordered = [each for each in ordered if follows(each, self.after)]
        return ordered[: self.limit], len(ordered) > self.limit
