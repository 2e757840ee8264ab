"""The Python twin of the native lanes. No lane is ever open, so every delta takes the ordinary path, which
sends the same bytes. `_native.pyi` has the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvasir.ports import router


class Lane:
    """See `_native.pyi`."""

    open = False
    tokens = b""
    characters = 0
    last_s = 0.0

    def close(self) -> None:
        """See `_native.pyi`."""


class SocketLane(Lane):
    """See `_native.pyi`."""

    def __init__(
        self,
        *,
        fd: int,
        pending: Callable[[], int],
        write: Callable[[bytes], None],
        before: bytes,
        after: bytes,
        chunked: bool,
        bounds: Buffer,
        counts: Buffer,
        total: Buffer,
        last_s: float,
    ) -> None:
        if len(memoryview(counts)) != len(memoryview(bounds)) + 1 or len(memoryview(total)) != 1:
            raise ValueError("a histogram has a count more than bounds, and one total")
        self.last_s = last_s


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

    def add(self, worker: str, leg: str, offset: int, lane: router.Lane) -> None:
        """See `_native.pyi`."""

    def take(self, worker: str, frame: bytes, now: float) -> tuple[list[int] | None, bool]:
        """See `_native.pyi`."""
        return None, True

    def __len__(self) -> int:
        return 0
