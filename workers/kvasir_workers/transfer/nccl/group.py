"""The link of a pair of agents: a process group of two ranks with NCCL between GPUs, otherwise a socket.

A single group of all workers would end with its first member. A group of two is created when a pair first
connects and ends with either side; the default group remains the engine's. Its store is relayed over the
control connection, so that the rendezvous needs no further port.

Only this module imports torch.distributed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.nccl.sockets import LINK_TIMEOUT_S, SERVER, StoreRelay, connect

PULLER = 1
NCCL_PAUSE_S = 0.00005
NCCL_ENVIRONMENT = {
    # NCCL's watchdog ends the whole process when a peer dies, unless it is configured to only clean up.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_environment_lock = threading.Lock()


class RelayedStore(distributed.Store):  # type: ignore[misc]
    """A key-value store of two sides over their control connection, used during the rendezvous."""

    def __init__(self, relay: StoreRelay) -> None:
        super().__init__()
        self._relay = relay
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key on both sides."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._values[key] = raw
            if not self._closed:
                self._relay.put(key, raw)

    def get(self, key: str) -> bytes:
        """Return a key, waiting for it. Raise TransferError."""
        with self._lock:
            while key not in self._values:
                if self._closed:
                    raise TransferError(f"the group requested {key!r} after its rendezvous")
                name, value = self._relay.next()
                self._values[name] = value
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. The relay has the deadline."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are present."""
        with self._lock:
            return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: the relay has the deadline."""

    def close(self) -> None:
        """End the rendezvous. After this the control connection has other readers."""
        with self._lock:
            self._closed = True


class NcclGroupLink(Protocol):
    """One pair's group as seen by one rank. One thread sends and receives; another may `abort`.

    Errors are raised as TransferError, after which the link cannot be used.
    """

    def send(self, tensor: Any, tag: int) -> Any:
        """Start to send; the tensor must not change until `finish`."""
        ...

    def receive(self, tensor: Any, tag: int) -> Any:
        """Start to receive the next message with the tag."""
        ...

    def finish(self, work: Any, limit_s: float = LINK_TIMEOUT_S) -> None:
        """Wait for a receive, at most `limit_s`, or for a send that the other side has received."""
        ...

    def abort(self) -> None:
        """Fail current and later operations."""
        ...

    def close(self) -> None:
        """End the group; nothing writes to a tensor afterwards."""
        ...


class Fabric:
    """State shared by one agent's links. `device` is "cpu" or "cuda:N"; servers listen only on `host`."""

    def __init__(self, host: str, device: str) -> None:
        self._device = device
        self._host = host
        if device != "cpu" and not distributed.is_nccl_available():
            raise TransferError(f"KV is on {device}, but this build of torch has no NCCL")

    def tensor(self, data: bytes) -> Any:
        """Return bytes in the memory that groups move."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def link(self, rank: int, relay: StoreRelay) -> NcclGroupLink:
        """Connect to the other side. Raise TransferError."""
        if self._device == "cpu":
            return connect(rank, self._host, relay)
        store = RelayedStore(relay)
        try:
            return NcclLink(store, rank, self._device)
        except RuntimeError as error:
            raise TransferError(
                f"cannot create a process group with the other side: {_gist(error)}"
            ) from error
        finally:
            store.close()


class NcclLink:
    """See NcclGroupLink. Waits poll, since nothing else can end a wait for a peer that hangs."""

    def __init__(self, store: RelayedStore, rank: int, device: str) -> None:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=LINK_TIMEOUT_S)
        self._other = 1 - rank
        self._device = torch.device(device)
        self._aborted = threading.Event()
        torch.cuda.set_device(self._device)
        with _environment_lock:
            before = {name: os.environ.get(name) for name in NCCL_ENVIRONMENT}
            os.environ.update(NCCL_ENVIRONMENT)
            try:
                self._group: Any = distributed.ProcessGroupNCCL(store, rank, 2, options)
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
        # NCCL creates its communicator with the first message, and needs the store for it.
        first = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self.finish(self.send(first, 0) if rank == SERVER else self.receive(first, 0))

    def send(self, tensor: Any, tag: int) -> Any:
        """See NcclGroupLink."""
        with _translated():
            return self._group.send([tensor], self._other, tag)

    def receive(self, tensor: Any, tag: int) -> Any:
        """See NcclGroupLink."""
        with _translated():
            return self._group.recv([tensor], self._other, tag)

    def finish(self, work: Any, limit_s: float = LINK_TIMEOUT_S) -> None:
        """See NcclGroupLink."""
        deadline_s = time.monotonic() + limit_s
        with _translated():
            while not work.is_completed():
                if time.monotonic() >= deadline_s:
                    self.abort()
                if self._aborted.wait(NCCL_PAUSE_S):
                    raise TransferError("the process group was aborted")
            work.wait()
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """See NcclGroupLink."""
        if not self._aborted.is_set():
            self._aborted.set()
            self._group.abort()

    def close(self) -> None:
        """See NcclGroupLink."""
        self.abort()
        self._group = None


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        raise TransferError(f"the process group broke: {_gist(error)}") from error


def _gist(error: Exception) -> str:
    """Return the error's core text, without the advice behind it."""
    text = str(error).partition("\n")[0].partition(". ")[0]
    return text or type(error).__name__
