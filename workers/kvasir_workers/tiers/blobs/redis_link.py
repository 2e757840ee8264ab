"""Connections to one Redis on which every wait has a deadline. The only module that uses the client library.

The library's timeouts are per socket read, so a server that sends slowly blocks its caller indefinitely; and
it has one timeout per connection, while a lookup on a request's path may wait some milliseconds and a block
half a second. Here a connection has a deadline, set for each use, that covers connect, login, send and
receive together. Only the DNS lookup of the server is bounded by the system instead.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.credentials import CredentialProvider
from redis.retry import Retry

from kvasir.config.spec.tiers import RedisTierSpec

# Past its deadline a connection still reads what has already arrived: the caller may have waited for a CPU.
_GRACE_S = 0.005
_READ_BYTES = 128 << 10
_SEND_BYTES = 1 << 20
_CLUSTER = ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN")
_REMEDIES = {
    "OOM": "raise its maxmemory, or set maxmemory-policy to allkeys-lru",
    "READONLY": "give tiers.redis.url the address of the primary",
    "MISCONF": "it cannot save its data: see its log, or turn persistence off",
    "NOPERM": "allow the user EXISTS, GETRANGE, EXPIRE, SET and UNLINK on its keys",
    **dict.fromkeys(_CLUSTER, "it is part of a cluster; give tiers.redis.url a single server or a proxy"),
}


class LinkError(Exception):
    """The server cannot be used. `trouble` is the reason and the remedy; `timed_out`: a deadline passed."""

    def __init__(self, trouble: str, *, timed_out: bool = False) -> None:
        super().__init__(trouble)
        self.trouble = trouble
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class RedisRefusal:
    """An error reply of the server: a code such as OOM or READONLY, and its explanation."""

    code: str
    text: str

    @property
    def moved(self) -> bool:
        """Whether the server cannot be used at all."""
        return self.code in _CLUSTER

    @property
    def trouble(self) -> str:
        """The error and its remedy."""
        return f"{self.text} ({self.code}): {_REMEDIES.get(self.code, 'check the server')}"


Reply = bytes | int | None | RedisRefusal
Piece = bytes | memoryview


def command(*parts: bytes) -> bytes:
    """Return an encoded command."""
    head = b"*%d\r\n" % len(parts)
    return head + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def set_command(key: bytes, header: bytes, data: memoryview, ttl_s: int) -> tuple[Piece, ...]:
    """Return a SET of a value made of two pieces, which are not copied, with a time to live."""
    length = len(header) + data.nbytes
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, length)
    ttl = b"%d" % ttl_s
    return head + header, data, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)


# The library's functions are untyped where the calls below say so.


class RedisConnection:
    """One connection. Replies arrive in the order of the commands. Every method raises LinkError, after which
    the connection cannot be used."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def until(self, deadline: float) -> None:
        """Set the deadline of all further waits."""
        self._connection.set_deadline(deadline)

    def send(self, pieces: Sequence[Piece]) -> None:
        """Send encoded commands."""
        with self._connection.explained():
            self._connection.send_packed_command(pieces, check_health=False)  # type: ignore[no-untyped-call]

    def receive(self) -> Reply:
        """Return the next reply."""
        with self._connection.explained():
            try:
                reply: Reply = self._connection.read_response(disable_decoding=True)
            except exceptions.ResponseError as error:
                text = str(error)
                code = error.status_code or text.partition(" ")[0]
                return RedisRefusal(code, text)
        return reply

    def whole(self) -> bool:
        """Return whether it is open and has no unexpected input."""
        try:
            return self._connection.is_connected and not self._connection.can_read(0)
        except exceptions.RedisError:
            return False

    def close(self) -> None:
        """Idempotent."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]


class RedisLink:
    """At most `spec.connections` connections to the server of the spec. For one thread."""

    def __init__(self, spec: RedisTierSpec, now: Callable[[], float]) -> None:
        self._spec = spec
        self._now = now
        self._lines: list[RedisConnection] = []

    def take(self, at_least: int, deadline: float) -> list[RedisConnection]:
        """Return all open connections, opening up to `at_least` before the deadline. Raise LinkError."""
        lines, self._lines = self._lines, []
        for line in lines:
            if line.whole():
                line.until(deadline)
                self._lines.append(line)
            else:
                line.close()
        while len(self._lines) < min(at_least, self._spec.connections):
            self._lines.append(self._dial(deadline))
        return self._lines

    def hang_up(self) -> None:
        """Close all connections: some may have outstanding replies."""
        for line in self._lines:
            line.close()
        self._lines = []

    def _dial(self, deadline: float) -> RedisConnection:
        connection = _Connection(self._spec, self._now)
        connection.set_deadline(deadline)
        try:
            with connection.explained():
                connection.connect()  # type: ignore[no-untyped-call]
        except LinkError:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        return RedisConnection(connection)


class _Credentials(CredentialProvider):
    def __init__(self, spec: RedisTierSpec) -> None:
        self._spec = spec

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        path = self._spec.password_file
        password = Path(path).read_text().strip() if path is not None else ""
        return (password,) if self._spec.username is None else (self._spec.username, password)


class _Connection(Connection):
    """The library's connection, over sockets with a deadline."""

    def __init__(self, spec: RedisTierSpec, now: Callable[[], float]) -> None:
        url = urlsplit(spec.url)
        logs_in = spec.username is not None or spec.password_file is not None
        super().__init__(  # type: ignore[no-untyped-call]
            host=url.hostname or "",
            port=url.port or 6379,
            db=int(url.path.lstrip("/") or 0),
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            credential_provider=_Credentials(spec) if logs_in else None,
            # RESP2 is supported by all servers since version 6, and takes the fewest round trips to connect.
            protocol=2,
            driver_info=None,
        )
        self._spec = spec
        self._now = now
        self._deadline = 0.0
        self._wire: _Wire | None = None

    def set_deadline(self, deadline: float) -> None:
        """Set the deadline of all further operations."""
        self._deadline = deadline
        if self._wire is not None:
            self._wire.deadline = deadline

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Convert the library's exceptions to LinkError."""
        where = f"{self.host}:{self.port}"
        try:
            yield
        except exceptions.TimeoutError as error:
            trouble = f"{where} did not answer in time: see that it runs, look at its load and at the network"
            raise LinkError(trouble, timed_out=True) from error
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
            trouble = f"{where} refuses the login ({error}): check username and password_file"
            raise LinkError(trouble) from error
        except exceptions.BusyLoadingError as error:
            raise LinkError(f"{where} is still loading its data: wait for it") from error
        except exceptions.ConnectionError as error:
            raise LinkError(
                f"{where} cannot be reached ({error}): see that it runs, and check its url"
            ) from error
        except exceptions.RedisError as error:
            raise LinkError(f"{where} does not answer like a Redis ({error}): check its url") from error
        except OSError as error:
            raise LinkError(f"{error.strerror} ({error.filename}): check password_file") from error

    def _connect(self) -> _Wire:
        """Return a connected socket for the library; raise OSError."""
        failed: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.host, self.port, 0, socket.SOCK_STREAM
        ):
            raw = socket.socket(family, kind, protocol)
            try:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                raw.settimeout(max(self._deadline - self._now(), _GRACE_S))
                raw.connect(address)
                if self._spec.url.startswith("rediss:"):
                    context = ssl.create_default_context(cafile=self._spec.ca_file)
                    raw = context.wrap_socket(raw, server_hostname=self.host)
            except OSError as error:
                raw.close()
                failed = error
            else:
                self._wire = _Wire(raw, self._now, self._deadline)
                return self._wire
        raise failed or OSError("its name has no address")


class _Wire:
    """A socket, plain or with TLS, with the methods that the library uses; every call ends by `deadline`."""

    def __init__(self, raw: socket.socket, now: Callable[[], float], deadline: float) -> None:
        self._raw = raw
        self._now = now
        self.deadline = deadline

    def recv_into(self, buffer: bytearray) -> int:
        self._arm()
        try:
            return self._raw.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise TimeoutError from None

    def recv(self, size: int, flags: int = 0) -> bytes:
        return self._raw.recv(size, flags)

    def sendall(self, data: Piece) -> None:
        left = memoryview(data).cast("B")
        while left:
            self._arm()
            try:
                left = left[self._raw.send(left[:_SEND_BYTES]) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                raise TimeoutError from None

    def settimeout(self, timeout: float | None) -> None:
        """Ignored: the deadline applies."""

    def pending(self) -> int:
        return self._raw.pending() if isinstance(self._raw, ssl.SSLSocket) else 0

    def fileno(self) -> int:
        return self._raw.fileno()

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()

    def _arm(self) -> None:
        left = self.deadline - self._now()
        if left < -_GRACE_S:
            raise TimeoutError
        self._raw.settimeout(max(left, 0.0))
