"""The results of a batch's lines while it runs: each is stored before it is counted, and read again after a
restart.

A journal is a folder of segments, each written as a whole. Their names begin with the fencing token of the
process that wrote them, so that two never write the same segment; of two results for a line, the first is the
line's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from kvasir.core.errors import CapacityError
from kvasir.ports.storage import ObjectStorage

_MERGED = 64
"""Segments that become one: a batch that runs for a day would leave hundreds of thousands."""
_LISTINGS = 4


class LineResult(Struct, array_like=True, frozen=True):
    """The result of the line with this number, the first being 0. `ok`: it has an answer. `usage` has its
    tokens: of the input, cached, of the output, and of reasoning. `shown` is its line of the output or error
    file."""

    number: int
    ok: bool
    usage: tuple[int, int, int, int]
    shown: msgspec.Raw


_DECODER = msgspec.json.Decoder(LineResult)
_encode = msgspec.json.Encoder().encode


class Journal:
    """The journal of one batch in `folder`, to which the holder of `token` may append."""

    def __init__(self, storage: ObjectStorage, folder: str, token: int = 0) -> None:
        self._storage = storage
        self._folder = folder
        self._token = token
        self._recent: list[str] = []
        self._segments = 0

    def results(self) -> Iterator[LineResult]:
        """Yield the result of each line that has one, once. Raise CapacityError if segments vanish all the
        time."""
        seen: set[int] = set()
        known: set[str] = set()
        for _ in range(_LISTINGS):
            vanished = False
            for name in self._storage.names(self._folder):
                if name in known:
                    continue
                content = self._storage.get(f"{self._folder}/{name}")
                if content is None:
                    # A process that has lost its lease without noticing has merged it with others.
                    vanished = True
                    continue
                known.add(name)
                for row in content.splitlines():
                    result = _DECODER.decode(row)
                    if result.number not in seen:
                        seen.add(result.number)
                        yield result
            if not vanished:
                return
        raise CapacityError(f"The journal {self._folder} does not stay.", code="storage_unavailable")

    def append(self, results: Sequence[LineResult]) -> None:
        """Store results; they are durable when this returns."""
        name = f"{self._token:012d}-{self._segments:09d}"
        self._segments += 1
        self._storage.put(f"{self._folder}/{name}", [_encode(each) + b"\n" for each in results])
        self._recent.append(name)
        if len(self._recent) == _MERGED:
            self._merge()

    def clear(self) -> None:
        """Remove the journal, once its results are in files."""
        for name in self._storage.names(self._folder):
            self._storage.remove(f"{self._folder}/{name}")

    def _merge(self) -> None:
        """Make one segment of the last ones. A crash in between leaves results twice, which are read once."""
        keys = [f"{self._folder}/{name}" for name in self._recent]
        self._storage.put(f"{keys[0]}-m", (self._storage.get(key) or b"" for key in keys))
        for key in keys:
            self._storage.remove(key)
        self._recent.clear()
