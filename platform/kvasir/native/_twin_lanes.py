"""The Python twin of the native lanes. No lane is ever open, so every delta takes the ordinary path, which
sends the same bytes. `_native.pyi` has the contract."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvasir.ports import router


class StreamTokens:
    """See `_native.pyi`."""

    __slots__ = ("_ids", "_start", "characters")

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._ids = array("I")
        self.characters = 0

    def add(self, ids: Iterable[int], characters: int) -> None:
        """See `_native.pyi`."""
        self._ids.extend(ids)
        self.characters += characters

    @property
    def count(self) -> int:
        """See `_native.pyi`."""
        return self._start + len(self._ids)

    @property
    def tokens(self) -> array[int]:
        """See `_native.pyi`."""
        return self._ids[:]

    def slice(self, begin: int, end: int) -> array[int]:
        """See `_native.pyi`."""
        return self._ids[max(0, begin - self._start) : max(0, end - self._start)]

    def fence(self) -> None:
        """See `_native.pyi`."""


class StreamGaps:
    """See `_native.pyi`."""

    __slots__ = ("_bounds", "_counts", "_total", "count", "last_s")

    def __init__(self, bounds: Buffer, counts: Buffer, total: Buffer) -> None:
        self._bounds = memoryview(bounds).cast("B").cast("d")
        self._counts = memoryview(counts).cast("B").cast("Q")
        self._total = memoryview(total).cast("B").cast("d")
        if len(self._counts) != len(self._bounds) + 1 or len(self._total) != 1:
            raise ValueError("a histogram has a count more than bounds, and one total")
        self.count = 0
        self.last_s: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """See `_native.pyi`."""
        if not tokens:
            return
        if self.last_s is not None:
            gap = (now - self.last_s) / tokens
            self._counts[bisect_left(self._bounds, gap)] += tokens
            self._total[0] += gap * tokens
        self.count += tokens
        self.last_s = now


class Lane:
    """See `_native.pyi`."""

    open = False

    def close(self) -> None:
        """See `_native.pyi`."""


class SocketLane(Lane):
    """See `_native.pyi`."""

    def __init__(
        self,
        *,
        fd: int,
        plain: bool,
        pending: Callable[[], int],
        write: Callable[[bytes], None],
        before: bytes,
        after: bytes,
        chunked: bool,
        gaps: StreamGaps,
    ) -> None:
        """Opens nothing."""


class Relay:
    """See `_native.pyi`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is never called."""

    def lane(self, request: str) -> Lane:
        """See `_native.pyi`."""
        return Lane()

    def take(self) -> bytes:
        """See `_native.pyi`."""
        return b""

    def __len__(self) -> int:
        return 0


class Fan:
    """See `_native.pyi`."""

    def add(self, worker: str, leg: str, tokens: StreamTokens, lane: router.Lane) -> None:
        """See `_native.pyi`."""

    def take(self, worker: str, frame: bytes, now: float) -> tuple[list[int] | None, bool]:
        """See `_native.pyi`."""
        return None, True

    def __len__(self) -> int:
        return 0
