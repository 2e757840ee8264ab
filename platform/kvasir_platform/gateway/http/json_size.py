"""Counts the arrays, objects and values of a JSON body while it arrives, before anything is built from it.

An empty array takes two bytes of a body and many times as many in memory, and every step after the decoder
visits it again: a body within its limit of bytes could occupy the event loop for seconds. Counting brackets
is several times cheaper than decoding, and most bodies have so few that it does not matter which of them are
inside strings. Only others are counted exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvasir.core.errors import RequestError

MAX_CONTAINERS = 1 << 15
"""Maximum number of arrays and objects in a body, and in the JSON texts inside of it together."""
MAX_VALUES = 1 << 19
"""Maximum number of elements of arrays and members of objects in a body."""
MAX_STRINGS = 1 << 17
"""Maximum number of strings in a body, keys of objects included: each takes more time than a number."""
SMALL_BYTES = min(MAX_CONTAINERS, MAX_VALUES, 2 * MAX_STRINGS)
"""Up to this size a body needs no count: each of what is counted takes a byte."""
_EXACT_BYTES = 1 << 19
"""A larger body is counted exactly from here on: to begin later would take too long at once."""
_SLICE = 2 << 10
_STRING = re.compile(rb'"[^"]*"')
_DROPPED = bytes(set(range(256)) - set(b'[{",'))


class JsonCounts:
    """Counts of arrays and objects, of values, and of quotes, of which a string has two."""

    __slots__ = ("containers", "quotes", "values")

    def __init__(self) -> None:
        self.containers = 0
        self.values = 0
        self.quotes = 0

    @property
    def excess(self) -> str:
        """What there is too much of; empty within the limits."""
        if self.containers > MAX_CONTAINERS:
            return f"more than {MAX_CONTAINERS} arrays and objects"
        if self.values > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
        if self.quotes > 2 * MAX_STRINGS:
            return f"more than {MAX_STRINGS} strings"
        return ""


class JsonSize(JsonCounts):
    """The size of one JSON text, which arrives in pieces. The counts are upper bounds; where they exceed the
    limits they are exact, for valid JSON."""

    __slots__ = ("_bytes", "_exact", "_in_string", "_kept")

    def __init__(self) -> None:
        super().__init__()
        self._exact = False
        self._in_string = False
        self._kept = b""
        self._bytes = 0

    def add(self, piece: bytes, pieces: Iterable[bytes | bytearray]) -> None:
        """Count `piece`; `pieces` are all so far, including this one. Raise RequestError beyond a limit."""
        self._bytes += len(piece)
        if self._exact:
            self._scan(piece)
        else:
            marks = bytearray()
            for at in range(0, len(piece), _SLICE):
                marks += piece[at : at + _SLICE].translate(None, _DROPPED)
            self.containers += marks.count(b"[") + marks.count(b"{")
            self.values += marks.count(b",")
            self.quotes += marks.count(b'"')
            if self.excess or self._bytes > _EXACT_BYTES:
                self._exact = True
                self.containers = self.values = self.quotes = 0
                for each in pieces:
                    self._scan(each)
        if self.excess:
            raise RequestError(f"The body has {self.excess}.", code="body_too_complex")

    def _scan(self, piece: bytes | bytearray) -> None:
        for at in range(0, len(piece), _SLICE):
            if self.excess:
                return
            self._scan_slice(piece[at : at + _SLICE])

    def _scan_slice(self, part: bytes | bytearray) -> None:
        part = self._kept + part
        bare = part.rstrip(b"\\")
        # An escape may continue in the next slice.
        odd = (len(part) - len(bare)) % 2
        self._kept = b"\\" if odd else b""
        if odd:
            part = part[:-1]
        part = part.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _DROPPED)
        quotes = part.count(b'"')
        self.quotes += quotes
        if self._in_string:
            part = b'"' + part
        self._in_string ^= quotes % 2 == 1
        outside = _STRING.sub(b"", part).partition(b'"')[0]
        self.containers += outside.count(b"[") + outside.count(b"{")
        self.values += outside.count(b",")


class JsonTexts(JsonCounts):
    """The JSON texts inside of a body's strings, such as the arguments of tool calls, which are decoded
    too."""

    __slots__ = ()

    def add(self, text: str) -> None:
        """Count one text. Raise RequestError if the texts together exceed the limits of a body."""
        data = text.encode("utf-8", "surrogatepass")
        size = JsonSize()
        size.add(data, (data,))
        self.containers += size.containers
        self.values += size.values
        self.quotes += size.quotes
        if self.excess:
            raise RequestError(f"The body has JSON texts with {self.excess} in all.", code="body_too_complex")
