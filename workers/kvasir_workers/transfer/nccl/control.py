"""The control connection of two agents: authentication, framed messages, and waits that can be interrupted.

One thread per connection does all reading, writing and waiting. Other threads only wake or stop it, through
an eventfd that it polls together with the socket.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.lease_keys import MAC_BYTES, lease_key, mac, same
from kvasir_workers.transfer.nccl.messages import MAX_FRAME_BYTES, Message, decode, encode

MAGIC = b"kvasir-nccl-2\n"
NONCE_BYTES = 32
FENCE_BYTES = 8
NAME_BYTES = 2
MAX_LEASE_ID_BYTES = 1024
LENGTH_BYTES = 4
READ_BYTES = 256 << 10
SEND_S = 10.0
KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}
"""Detects an unreachable host within a minute."""
CHECK_S = 1.0
"""Interval at which a thread that waits for an answer checks its deadline."""


class Waker:
    """Interrupts another thread's wait: once per `wake`, permanently with `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self.stopped = False

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._event

    def wake(self) -> None:
        """End the current wait, or the next one."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """End the current and all further waits."""
        self.stopped = True
        self.wake()

    def clear(self) -> None:
        """Reset after a wake-up; called by the waiting thread."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the file descriptor. Called by the waiting thread after its last wait."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._event)


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A lease of a serving agent, and the key for it from a ticket."""

    lease_id: str
    fence: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Greeting:
    """The key by which two agents met, and the nonces of both, which no other connection has."""

    key: bytes
    nonces: bytes

    def proof(self, purpose: bytes) -> bytes:
        """Return what shows for one purpose that its writer has the key and takes part in this connection."""
        return mac(self.key, purpose, self.nonces)


def request_proof(key: bytes, nonces: bytes, number: int) -> bytes:
    """Return the proof of a PullRequest of this number, by the key of its lease."""
    return mac(key, b"request", nonces, number.to_bytes(8, "little"))


def socket_for(host: str) -> socket.socket:
    """Return a socket of the host's address family. Raise TransferError."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"the endpoint's host cannot be resolved: {error}") from error


class Control:
    """A connected socket and its waker. Every connection error is raised as TransferError, after which the
    connection cannot be used. `now` reads a monotonic clock in seconds."""

    def __init__(self, connection: socket.socket, waker: Waker, now: Callable[[], float]) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connection
        self._waker = waker
        self._now = now
        self._received = bytearray()

    def connect(self, address: tuple[str, int], deadline_s: float) -> None:
        """Connect to the other side. Raise TransferError."""
        try:
            self._socket.connect(address)
        except BlockingIOError:
            self._ready(select.POLLOUT, deadline_s)
        except OSError as error:
            raise TransferError(f"cannot be reached: {error}") from error
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise TransferError(f"cannot be reached: {os.strerror(code)}")

    def admit(self, secret: bytes, deadline_s: float) -> Greeting:
        """Authenticate a puller by the key of the lease that it names, and prove to it that this agent has
        the secret from which the key follows. Raise TransferError."""
        mine = os.urandom(NONCE_BYTES)
        self._write(MAGIC + mine)
        answer = self._read_exactly(NONCE_BYTES + MAC_BYTES + FENCE_BYTES + NAME_BYTES, deadline_s)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]
        fence, length = answer[-FENCE_BYTES - NAME_BYTES : -NAME_BYTES], answer[-NAME_BYTES:]
        size = int.from_bytes(length, "little")
        if size > MAX_LEASE_ID_BYTES:
            raise TransferError("it named no lease")
        lease_id = self._read_exactly(size, deadline_s).decode(errors="replace")
        key = lease_key(secret, lease_id, int.from_bytes(fence, "little"))
        greeting = Greeting(key, mine + theirs)
        if not same(proof, greeting.proof(b"pull")):
            raise TransferError("it has no ticket of this agent's")
        self._write(greeting.proof(b"serve"))
        return greeting

    def enter(self, claim: LeaseClaim, deadline_s: float) -> Greeting:
        """The puller's side of `admit`, with a lease of which it has the key. Raise TransferError."""
        greeting = self._read_exactly(len(MAGIC) + NONCE_BYTES, deadline_s)
        if not greeting.startswith(MAGIC):
            raise TransferError("the peer at this address is not a transfer agent of this version")
        mine = os.urandom(NONCE_BYTES)
        greeted = Greeting(claim.key, greeting[len(MAGIC) :] + mine)
        name, fence = claim.lease_id.encode(), claim.fence.to_bytes(FENCE_BYTES, "little")
        self._write(mine + greeted.proof(b"pull") + fence + len(name).to_bytes(NAME_BYTES, "little") + name)
        proof = self._read_exactly(MAC_BYTES, deadline_s)
        if not same(proof, greeted.proof(b"serve")):
            raise TransferError("the peer at this address did not issue this ticket")
        return greeted

    def send(self, message: Message) -> None:
        """Write one message. Raise TransferError, also if the other side does not read for SEND_S."""
        payload = encode(message)
        self._write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)

    def take(self) -> list[Message]:
        """Return received messages without waiting. Raise TransferError if the connection is closed or
        broken."""
        try:
            received = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            received = None
        except OSError as error:
            raise TransferError(f"the control connection broke: {error}") from error
        if received == b"":
            raise TransferError("the other side closed the control connection")
        self._received += received or b""
        messages: list[Message] = []
        while len(self._received) >= LENGTH_BYTES:
            length = int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise TransferError(f"a control message of {length} bytes exceeds {MAX_FRAME_BYTES}")
            if len(self._received) < LENGTH_BYTES + length:
                break
            messages.append(decode(bytes(self._received[LENGTH_BYTES : LENGTH_BYTES + length])))
            del self._received[: LENGTH_BYTES + length]
        return messages

    def wait(self, seconds: float) -> None:
        """Return when there is something to read, when woken, or after `seconds`."""
        self._poll(select.POLLIN, seconds)

    def receive(self, deadline_s: float) -> list[Message]:
        """Wait for and return at least one message. Raise TransferError, also when stopped or past the
        deadline."""
        while True:
            messages = self.take()
            if messages:
                return messages
            self._ready(select.POLLIN, deadline_s)

    def comes_to(self, listener: socket.socket, deadline_s: float) -> bool:
        """Wait until a connection comes to the listener, or something to read to this one. Return whether it
        is the former. Raise TransferError when stopped or past the deadline."""
        poller = select.poll()
        for each in (listener, self._socket, self._waker):
            poller.register(each, select.POLLIN)
        found = dict(poller.poll(1000 * max(deadline_s - self._now(), 0.0)))
        if self._waker.stopped:
            raise TransferError("this agent ended the connection")
        if not found:
            raise TransferError("the other side did not connect before the deadline")
        return listener.fileno() in found

    def close(self) -> None:
        """Close the connection. The waker's owner closes the waker."""
        self._socket.close()

    def _ready(self, event: int, deadline_s: float) -> None:
        while not self._poll(event, min(CHECK_S, deadline_s - self._now())):
            if self._waker.stopped:
                raise TransferError("this agent ended the connection")
            if self._now() >= deadline_s:
                raise TransferError("the other side did not answer before the deadline")

    def _poll(self, event: int, seconds: float) -> bool:
        """Return whether the socket is ready for the event."""
        poller = select.poll()
        poller.register(self._socket, event)
        poller.register(self._waker, select.POLLIN)
        found = dict(poller.poll(1000 * max(seconds, 0.0)))
        if self._waker.fileno() in found:
            self._waker.clear()
        return self._socket.fileno() in found

    def _write(self, data: bytes) -> None:
        deadline_s = self._now() + SEND_S
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._ready(select.POLLOUT, deadline_s)
            except OSError as error:
                raise TransferError(f"the control connection broke: {error}") from error

    def _read_exactly(self, length: int, deadline_s: float) -> bytes:
        """Read bytes of the greeting; nothing is framed or decoded before authentication."""
        data = b""
        while len(data) < length:
            try:
                received = self._socket.recv(length - len(data))
            except BlockingIOError:
                self._ready(select.POLLIN, deadline_s)
                continue
            except OSError as error:
                raise TransferError(f"the control connection broke: {error}") from error
            if not received:
                raise TransferError("the other side closed the connection before authentication")
            data += received
        return data
