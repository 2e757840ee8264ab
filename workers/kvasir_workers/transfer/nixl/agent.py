"""A NIXL agent whose progress thread sleeps between events.

NIXL's Python wrapper fixes the progress thread's delay at 0, which uses a full core per idle engine; without
the thread, an idle prefill worker never answers a read over TCP. So the agent is built on NIXL's own
bindings, with a delay: UCX wakes the thread when something arrives, and the delay only bounds how late the
thread notices a lost wake-up (NIXL rounds it up to whole milliseconds). At 1 ms an idle agent takes 0.01
core; 10 ms takes a fifth of that and adds nothing to a pull over shared memory, 0.5 ms over TCP.

Only this module imports NIXL.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvasir.config.spec.base import is_loopback
from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.nics import interface_of, rdma_ports

_log = logging.getLogger(__name__)
_DEVICES = "UCX_NET_DEVICES"
_TRANSPORTS = "UCX_TLS"
_WITHIN_A_MACHINE = "^tcp,ib,sysv"
"""Shared memory, and what moves data of GPUs. Segments of System V are open to the user's group."""
_environment_lock = threading.Lock()

PROGRESS_DELAY_US = 1_000

Descriptor = tuple[int, int, int]
"""Address, length in bytes, device ordinal."""

Descriptors = npt.NDArray[np.uint64]
"""One row per Descriptor: NIXL accepts an array in a thirtieth of the time of a list."""


_MOVERS_WITHIN = {"all", "sm", "shm", "cma", "xpmem", "knem", "cuda", "cuda_ipc"}
_MOVERS_BEYOND = {"all", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5"}


class XferState(Enum):
    """State of a posted transfer."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def device_ordinal(device: str) -> int:
    """Return 0 for "cpu", N for "cuda:N"."""
    return int(device.partition(":")[2] or 0)


class NixlAgent:
    """One UCX worker with its registered memory and connected peers. Not thread-safe.

    `tcp`: UCX may use TCP on the interface that has the address `host`, if that is not a loopback address.
    NIXL's errors are raised as TransferError.
    """

    def __init__(self, name: str, host: str, *, tcp: bool = False) -> None:
        # Loads the CUDA and UCX libraries, which importing this module must not do.
        import nixl

        self._nixl: Any = nixl._bindings
        self.name = name
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        self._errors = _error_types(self._nixl)
        chosen = ""
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            with _ucx_environment(host, tcp=tcp) as added:
                chosen = _chosen(added)
                # Shared memory has no failures of a peer to report: a read of one that ended fails by itself.
                alone = is_loopback(host) and _TRANSPORTS in added
                options = {"ucx_error_handling_mode": "none"} if alone else {}
                self._backend: int = self._agent.createBackend("UCX", options)
        except self._errors as error:
            raise TransferError(f"NIXL could not start its UCX backend{chosen}: {error!r}") from error
        self._registered: list[Any] = []

    def register(self, regions: Sequence[Descriptor], device: str) -> None:
        """Register memory with the fabric. `device` is "cpu" or "cuda:N"."""
        descriptors = self._nixl.nixlRegDList(
            self._memory(device), [(address, length, ordinal, "") for address, length, ordinal in regions]
        )
        try:
            self._agent.registerMem(descriptors, [self._backend])
        except self._errors as error:
            raise TransferError(f"NIXL could not register {device} memory: {error!r}") from error
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """Return what a peer needs to read from this agent's registered memory."""
        return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Add a peer. Raise TransferError if it is unreachable or its metadata is another agent's."""
        try:
            loaded = self._agent.loadRemoteMD(metadata)
        except self._errors as error:
            raise TransferError(f"agent {name} is unreachable: {error!r}") from error
        loaded = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if loaded != name:
            self.forget_peer(loaded)
            raise TransferError(f"endpoint of agent {name} carries the metadata of {loaded}")

    def forget_peer(self, name: str) -> None:
        """Drop the connection to a peer, if any."""
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors:
            return

    def read(self, peer: str, local: Descriptors, remote: Descriptors, device: str) -> int:
        """Start to copy `remote` into `local`, pairwise; both are on `device`. Return a handle."""
        memory = self._memory(device)
        try:
            handle = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._nixl.nixlXferDList(memory, local),
                self._nixl.nixlXferDList(memory, remote),
                peer,
                "",
                [self._backend],
            )
        except self._errors as error:
            raise TransferError(f"read from {peer} was refused: {error!r}") from error
        try:
            self._agent.postXferReq(handle, "")
        except self._errors as error:
            self.release(handle)
            raise TransferError(f"read from {peer} did not start: {error!r}") from error
        return int(handle)

    def state(self, handle: int) -> XferState:
        """Progress a read and return its state. After FAILED nothing more is written."""
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors:
            return XferState.FAILED
        if status == self._nixl.NIXL_SUCCESS:
            return XferState.DONE
        return XferState.RUNNING if status == self._nixl.NIXL_IN_PROG else XferState.FAILED

    def release(self, handle: int) -> None:
        """Release a handle. This does not stop a running read: see receiving.py."""
        try:
            self._agent.releaseXferReq(handle)
        except self._errors:
            return

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message; delivery is not confirmed."""
        try:
            self._agent.genNotif(peer, message, [self._backend])
        except self._errors as error:
            raise TransferError(f"agent {peer} could not be notified: {error!r}") from error

    def notifications(self) -> list[bytes]:
        """Return the messages received since the last call."""
        try:
            arrived: dict[str, list[bytes]] = self._agent.getNotifs({}, [self._backend])
        except self._errors:
            return []
        return [message for messages in arrived.values() for message in messages]

    def close(self) -> None:
        """Close all connections. When this returns, nothing writes to registered memory."""
        for descriptors in self._registered:
            try:
                self._agent.deregisterMem(descriptors, [self._backend])
            except self._errors:
                continue
        self._registered.clear()
        self._agent = None

    def _memory(self, device: str) -> Any:
        return self._nixl.DRAM_SEG if device == "cpu" else self._nixl.VRAM_SEG


def ucx_variables(host: str, environ: Mapping[str, str], *, tcp: bool) -> dict[str, str]:
    """Return the variables with which UCX serves on `host`, without those that `environ` has.

    UCX's TCP transport listens on each interface that it may use, and gives whoever connects the memory of
    the process. So it is excluded, unless `tcp` allows it between machines; it then has the interface of
    `host` alone. RDMA devices have no listener. At a loopback address, shared memory is used instead.
    """
    found: dict[str, str] = {}
    if is_loopback(host):
        found[_TRANSPORTS] = _WITHIN_A_MACHINE
        if _TRANSPORTS in environ:
            found[_DEVICES] = "lo"
    elif tcp or _TRANSPORTS in environ:
        name = interface_of(host)
        if name is None:
            _log.warning("UCX may listen on every interface: none has the address of transfer.host %r", host)
        else:
            found[_DEVICES] = ",".join((name, *rdma_ports()))
    else:
        found[_TRANSPORTS] = "^tcp"
        if ports := rdma_ports():
            found[_DEVICES] = ",".join(ports)
    return {name: value for name, value in found.items() if name not in environ}


@contextmanager
def _ucx_environment(host: str, *, tcp: bool) -> Iterator[dict[str, str]]:
    """Let UCX read its variables from the environment; yield those that are added to it meanwhile. NIXL has
    no option that takes a list with a comma."""
    # What another agent adds while it starts must not be taken for the user's.
    with _environment_lock:
        added = ucx_variables(host, os.environ, tcp=tcp)
        os.environ.update(added)
        try:
            yield added
        finally:
            for name in added:
                del os.environ[name]


def _chosen(added: Mapping[str, str]) -> str:
    """Return what an error says of the user's variables that decide how UCX starts; "" if there are none."""
    users = [name for name in (_TRANSPORTS, _DEVICES) if name in os.environ and name not in added]
    values = " and ".join(f"{name}={os.environ[name]}" for name in users)
    return f" with {values} of the environment (unset, they are chosen for transfer.host)" if users else ""


def kernel_reads(host: str) -> bool:
    """Return whether the kernel may read for agents on `host`: within a machine, unless the user has chosen
    UCX's transports."""
    with _environment_lock:
        return is_loopback(host) and _TRANSPORTS not in os.environ


def senders_answer(host: str, *, rdma: bool) -> bool:
    """Return whether the sender's process has to answer each read, as over TCP, as far as can be determined.
    Otherwise the reader's kernel moves the bytes (same machine), or RDMA devices, if `rdma` says that there
    are any."""
    if not is_loopback(host) and not rdma:
        return True
    named = os.environ.get(_TRANSPORTS, "all")
    movers = _MOVERS_WITHIN if is_loopback(host) else _MOVERS_BEYOND
    return not named.startswith("^") and movers.isdisjoint(named.split(","))


def _error_types(bindings: Any) -> tuple[type[Exception], ...]:
    found = [
        value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")
    ]
    return (*(t for t in found if isinstance(t, type) and issubclass(t, Exception)), RuntimeError)
