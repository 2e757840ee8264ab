"""Process groups of two ranks, one for each pair of agents: torch.distributed with NCCL or gloo.

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
from kvasir_workers.transfer.common.other_engines import connecting_to_other_engines

SERVER, PULLER = 0, 1
LINK_TIMEOUT_S = 60.0
"""A message that the other side announced but does not send within this time ends the group. Pulls have their
own deadlines; this one covers chunks of abandoned pulls."""
GLOO_CONNECT_S = 10.0
"""Limit for gloo's connections of a new group: nothing else ends the wait for a side that left meanwhile."""
GLOO_CONNECT_TIMEOUTS = 5
"""gloo waits for a connection this many times the timeout of its context (gloo, transport/tcp/pair.cc)."""
ABORT_TAG = 1 << 20
NCCL_PAUSE_S = 0.00005
NCCL_ENVIRONMENT = {
    # NCCL's watchdog ends the whole process when a peer dies, unless it is configured to only clean up.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_environment_lock = threading.Lock()


class StoreRelay(Protocol):
    """The part of the control connection that a store uses. Both methods may raise TransferError."""

    def put(self, key: str, value: bytes) -> None:
        """Send a key to the other side."""
        ...

    def next(self) -> tuple[str, bytes]:
        """Wait for the next key from the other side."""
        ...


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
    """State shared by one agent's groups. `device` is "cpu" or "cuda:N"; gloo binds only `host`."""

    def __init__(self, host: str, device: str) -> None:
        self._device = device
        self._host = host
        self._gloo_device: Any = None
        if device == "cpu":
            if not distributed.is_gloo_available():
                raise TransferError("this build of torch has no gloo")
            try:
                with connecting_to_other_engines():
                    self._gloo_device = distributed.ProcessGroupGloo.create_device(hostname=host)
            except RuntimeError as error:
                raise TransferError(f"gloo cannot bind {host}: {error}") from error
        elif not distributed.is_nccl_available():
            raise TransferError(f"KV is on {device}, but this build of torch has no NCCL")

    def tensor(self, data: bytes) -> Any:
        """Return bytes in the memory that groups move."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def link(self, rank: int, relay: StoreRelay) -> NcclGroupLink:
        """Connect to the other side. Raise TransferError."""
        store = RelayedStore(relay)
        try:
            if self._device == "cpu":
                return GlooLink(store, rank, self._gloo_device)
            return NcclLink(store, rank, self._device)
        except RuntimeError as error:
            raise TransferError(
                f"cannot create a process group with the other side: {_gist(error)}"
            ) from error
        finally:
            store.close()


class GlooLink:
    """See NcclGroupLink. gloo closes all connections of a group when a wait times out.

    When a connection breaks, gloo drops the receive in progress and all started sends, and a wait for one of
    them never returns. So each tensor is followed by an empty message, which is waited for first because it
    is never partly received; and a send is waited for only after the other side confirmed its arrival.
    """

    def __init__(self, store: RelayedStore, rank: int, device: Any) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [device]
        options._threads = 1
        options._timeout = timedelta(seconds=GLOO_CONNECT_S / GLOO_CONNECT_TIMEOUTS)
        self._other = 1 - rank
        self._lock = threading.Lock()
        self._nothing = torch.empty(0, dtype=torch.uint8)
        with connecting_to_other_engines():
            self._group: Any = distributed.ProcessGroupGloo(store, rank, 2, options)

    def send(self, tensor: Any, tag: int) -> Any:
        """See NcclGroupLink."""
        with _translated():
            data = self._group.send([tensor], self._other, 2 * tag)
            return data, self._group.send([self._nothing], self._other, 2 * tag + 1)

    def receive(self, tensor: Any, tag: int) -> Any:
        """See NcclGroupLink."""
        with _translated():
            data = self._group.recv([tensor], self._other, 2 * tag)
            return data, self._group.recv([self._nothing], self._other, 2 * tag + 1)

    def finish(self, work: Any, limit_s: float = LINK_TIMEOUT_S) -> None:
        """See NcclGroupLink."""
        data, end = work
        with _translated():
            end.wait(timedelta(seconds=limit_s))
            data.wait(timedelta(seconds=limit_s))

    def abort(self) -> None:
        """See NcclGroupLink. An unanswered receive times out, which ends the group's connections."""
        with self._lock:
            if self._group is None:
                return
            never = torch.empty(1, dtype=torch.uint8)
            try:
                self._group.recv([never], self._other, ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return

    def close(self) -> None:
        """See NcclGroupLink."""
        self.abort()
        with self._lock:
            self._group = None


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
    """Return the error's core text: gloo puts its source line before it, and advice behind it."""
    text = str(error).partition("\n")[0].partition(". ")[0]
    return text.partition(".cc:")[2].partition("] ")[2] or text or type(error).__name__
