"""Agents of the transfer port for tests: each with its own memory, in this process or its own.

`python -m tests.kit.engines.transfer_peers FD NAME KIND` serves an agent to the test that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from kvasir.core.errors import KvasirError
from kvasir.core.identity import HEAD_MAJOR, KvLayout
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion, KvTransfer, Offer, TransferEvent
from kvasir_workers.transfer.common.sliced import LayerSlice, SlicedTransfer

BLOCKS = 64
LAYERS = 3
HEADS = 4
_PERIOD = 251
"""Bytes after which what a block holds repeats."""
# What the fork server imports, once for all agents.
_PRELOADED = [
    "pytest",
    __name__,
    "kvasir_workers.transfer.nccl.adapter",
    "kvasir_workers.transfer.nixl.adapter",
    "nixl._api",
]
_FORKS = multiprocessing.get_context("forkserver")


class Peer(Protocol):
    """One agent and its KV. Its clock changes only in `advance`."""

    def start(self, block_bytes: int, dtype: str = "float32", tensor_parallel_size: int = 1) -> str:
        """Allocate and register one rank's KV; return the endpoint."""
        ...

    def write(self, block: int, value: int) -> None:
        """Fill a block of every layer with bytes that depend on `value` and the layer."""
        ...

    def read(self, block: int) -> bytes:
        """A block of all layers."""
        ...

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port."""
        ...

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port."""
        ...

    def pull(  # noqa: PLR0917 - arguments cross processes by position
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        targets: Sequence[int],
        timeout_s: float,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
        reader: BlockPart | None = None,
    ) -> None:
        """See the port."""
        ...

    def release(self, lease_id: str) -> None:
        """See the port."""
        ...

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        ...

    def advance(self, seconds: float) -> None:
        """Advance this peer's clock."""
        ...

    def close(self) -> None:
        """See the port."""
        ...


def sliced(make: Callable[[str], KvTransfer]) -> SlicedTransfer:
    """Return a transfer of LAYERS in two slices; `make` makes an agent from a suffix of its name."""
    suffixes = iter(("-first", "-others"))
    slices = [LayerSlice(0, range(1)), LayerSlice(1, range(1, LAYERS))]
    return SlicedTransfer(slices, lambda: make(next(suffixes)))


class LocalPeer:
    """A peer in this process; `make` builds its agent from a clock."""

    def __init__(self, make: Callable[[Callable[[], float]], KvTransfer]) -> None:
        self._seconds = 0.0
        self._transfer = make(lambda: self._seconds)
        self._kv = np.zeros((LAYERS, BLOCKS, 0), dtype=np.uint8)

    def start(self, block_bytes: int, dtype: str = "float32", tensor_parallel_size: int = 1) -> str:
        """See Peer."""
        self._kv = np.zeros((LAYERS, BLOCKS, block_bytes), dtype=np.uint8)
        regions = [KvRegion(int(layer.ctypes.data), block_bytes, BLOCKS) for layer in self._kv]
        heads = HEADS // tensor_parallel_size
        size = LAYERS * block_bytes
        layout = KvLayout(32, dtype, HEAD_MAJOR, LAYERS, heads, 32, size, tensor_parallel_size)
        return self._transfer.register(regions, layout)

    def write(self, block: int, value: int) -> None:
        """See Peer."""
        size = self._kv.shape[2]
        for layer in range(LAYERS):
            # Computed once for each period: blocks of megabytes would take seconds.
            period = (np.arange(_PERIOD) * (2 * layer + 1) + value) % _PERIOD
            self._kv[layer, block] = np.resize(period.astype(np.uint8), size)

    def read(self, block: int) -> bytes:
        """See Peer."""
        return self._kv[:, block].tobytes()

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port."""
        return self._transfer.offer(lease_id, fence, blocks, ttl_s, total)

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port."""
        self._transfer.extend(lease_id, blocks)

    def pull(  # noqa: PLR0917 - arguments cross processes by position
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        targets: Sequence[int],
        timeout_s: float,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
        reader: BlockPart | None = None,
    ) -> None:
        """See the port."""
        self._transfer.pull(
            pull_id, offer, first, targets, timeout_s, source=source, target=target, reader=reader
        )

    def release(self, lease_id: str) -> None:
        """See the port."""
        self._transfer.release(lease_id)

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        return self._transfer.poll()

    def advance(self, seconds: float) -> None:
        """See Peer."""
        self._seconds += seconds

    def close(self) -> None:
        """See the port."""
        self._transfer.close()


class ForkedPeer:
    """A LocalPeer in its own process, forked from one that has imported what agents need. `kind` as in
    TransferSpec, or with a prefix `sliced-`; `ucx` are UCX_* variables. The process exits without running
    exit handlers."""

    def __init__(self, name: str, kind: str = "nixl", **ucx: str) -> None:
        _FORKS.set_forkserver_preload(_PRELOADED)
        self._connection, theirs = _FORKS.Pipe()
        with theirs:
            self._process = _FORKS.Process(target=_forked, args=(theirs, name, kind, ucx), daemon=True)
            self._process.start()

    @property
    def pid(self) -> int:
        """The process, for a test that stops or kills it."""
        assert self._process.pid is not None
        return self._process.pid

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(_call, self._connection, method)

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(timeout=10)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


class ProcessPeer:
    """The same in a separately started process, which exits as any Python process does."""

    def __init__(self, name: str, kind: str = "nixl", **ucx: str) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), name, kind],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ucx},
            )
        self._connection = Connection(mine.detach())

    @property
    def pid(self) -> int:
        """The process, for a test that stops or kills it."""
        return self._process.pid

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(_call, self._connection, method)

    def end(self) -> int:
        """Terminate the process; return its exit status, negative for a signal."""
        self._connection.close()
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _call(connection: Connection, method: str, *args: Any) -> Any:
    connection.send((method, args))
    value = connection.recv()
    if isinstance(value, Exception):
        raise value
    return value


def _forked(connection: Connection, name: str, kind: str, ucx: Mapping[str, str]) -> None:
    os.environ.update(ucx)
    serve(connection, name, kind)


def serve(connection: Connection, name: str, kind: str) -> None:
    """Answer calls until the other side closes the connection."""
    peer = LocalPeer(lambda now: _agent(name, kind, now))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(peer, method)(*args))
        except KvasirError as error:
            connection.send(error)


def _agent(name: str, kind: str, now: Callable[[], float]) -> KvTransfer:
    if kind.startswith("sliced-"):
        return sliced(lambda suffix: _agent(name + suffix, kind.removeprefix("sliced-"), now))
    # Only the process that has the agent imports its library.
    if kind == "nccl":
        from kvasir_workers.transfer.nccl.adapter import NcclTransfer

        return NcclTransfer("127.0.0.1", now)
    from kvasir_workers.transfer.nixl.adapter import NixlTransfer

    return NixlTransfer(name, "127.0.0.1", now)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
