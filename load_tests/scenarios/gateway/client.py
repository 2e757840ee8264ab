"""Clients of the gateway bench, in one separate process: raw sockets and epoll, so that they cost little.

The process itself reads the CPU time of the process under test when a measurement begins and ends. It reads
commands as one JSON object per line and answers each with one:

    {"do": "round", "scale": 1.0} generates the bodies of the next round
    {"do": "requests", "address", "key", "pid", "size"} sends all requests of a size, in a closed loop
    {"do": "streams", "address", "key", "pid", "streams", "window_s"} runs streams that do not end
    {"do": "ttft", "address", "key", "pid", "count"} sends one request at a time
    {"do": "whole", "address", "key", "pid", "streams", "chars", "window_s"} keeps that many whole requests
    running, of prompts of that many characters

An address is HOST:PORT, or https://HOST:PORT, whose certificate is not verified.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from load_tests.scenarios.gateway.bodies import (
    MEAN_OUTPUT,
    SIZES,
    STREAM_TOKENS,
    WARM,
    MeanRequests,
    Round,
    payload,
    request,
    short_chat,
)
from load_tests.scenarios.gateway.pacing import AT_ONCE, TOKEN, TOKENS_PER_S
from load_tests.scenarios.gateway.usage import cpu_s
from load_tests.scenarios.tokenizing import Texts

_END = b"0\r\n\r\n"
_TOKEN = TOKEN.encode()
_PATIENCE_S = 20.0
_SETTLE_S = 1.0
_PAUSE_S = 0.002
_READ, _RECORD = 1 << 18, 4 << 10


class BenchError(Exception):
    """A system under test did not answer as expected; the message has its answer."""


def connect(address: str, timeout_s: float | None = None) -> socket.socket:
    """Connect to HOST:PORT, or to https://HOST:PORT after a TLS handshake."""
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout_s)
    if not scheme:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


class Conversation:
    """One non-blocking connection, with the unsent rest of its request and the state of its answer."""

    def __init__(self, address: str) -> None:
        self.sock = connect(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.tokens = 0
        self.events = 0
        self._unsent = memoryview(b"")
        self._tail = b""
        self._begun = False

    def ask(self, data: bytes) -> bool:
        """Begin a request; return True when all of it is sent."""
        self._unsent = memoryview(data)
        self._tail, self._begun = b"", False
        return self.send()

    def send(self) -> bool:
        """Continue sending; return True when nothing remains."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, ssl.SSLWantWriteError):
                return False
            self._unsent = self._unsent[sent:]
        return True

    def read(self) -> bool:
        """Read available bytes; return True when the answer is complete. Raise BenchError."""
        try:
            data = self._received()
        except ssl.SSLWantReadError:
            return False
        if not data:
            raise BenchError(f"the connection was closed after {self._tail!r}")
        seen = self._tail + data
        if not self._begun:
            self._begun = True
            if b" 200 " not in seen[:20]:
                raise BenchError(seen[:600].decode(errors="replace"))
        self.tokens += seen.count(_TOKEN) - self._tail.count(_TOKEN)
        self.events += data.count(b"data: {")
        self._tail = seen[-len(_END) :]
        return self._tail == _END

    def _received(self) -> bytes:
        if not isinstance(self.sock, ssl.SSLSocket):
            return self.sock.recv(_READ)
        data = self.sock.recv(_RECORD)
        # Nothing polls for what is decrypted already.
        while more := self.sock.pending():
            data += self.sock.recv(more)
        return data


class Load:
    """Many concurrent conversations."""

    def __init__(self, address: str, connections: int) -> None:
        self._poll = select.epoll()
        self.all: dict[int, Conversation] = {}
        for _ in range(connections):
            made = Conversation(address)
            self.all[made.sock.fileno()] = made
            self._poll.register(made.sock.fileno(), select.EPOLLIN)

    def begin(self, conversation: Conversation, data: bytes) -> None:
        """Send a request on one of them."""
        if not conversation.ask(data):
            self._poll.modify(conversation.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def turn(self, ended: Callable[[Conversation], None]) -> None:
        """Handle the connections that are ready. Raise BenchError when none is ready for long."""
        if not self.turn_within(_PATIENCE_S, ended):
            raise BenchError(f"nothing was received for {_PATIENCE_S:g} s")

    def turn_within(self, seconds: float, ended: Callable[[Conversation], None]) -> bool:
        """Handle the connections that are ready by then; return whether any was."""
        ready = self._poll.poll(seconds)
        for fd, what in ready:
            conversation = self.all[fd]
            if what & select.EPOLLOUT and conversation.send():
                self._poll.modify(fd, select.EPOLLIN)
            if what & ~select.EPOLLOUT and conversation.read():
                ended(conversation)
        return bool(ready)

    def tokens(self) -> tuple[int, int]:
        """Tokens and events received in total."""
        each = self.all.values()
        return sum(one.tokens for one in each), sum(one.events for one in each)

    def close(self) -> None:
        """Close all connections."""
        self._poll.close()
        for conversation in self.all.values():
            conversation.sock.close()


class Client:
    """Executes the commands of the module."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._round: Round | None = None
        self._mean: dict[int, MeanRequests] = {}
        self._asked = 0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute one command. Raise BenchError or OSError."""
        do = order.pop("do")
        if do == "round":
            self._round = Round(self._texts, order["scale"])
            return {name: len(bodies) for name, bodies in self._round.bodies.items()}
        if do == "requests":
            return self._requests(**order)
        if do == "whole":
            return self._whole(**order)
        return self._streams(**order) if do == "streams" else self._ttft(**order)

    def _requests(self, address: str, key: str, pid: int, size: str) -> dict[str, Any]:
        assert self._round is not None
        kind = next(each for each in (*SIZES, WARM) if each.name == size)
        waiting = [request(body, address, key) for body in self._round.bodies[size]]
        count = len(waiting)
        load = Load(address, min(kind.connections, count))
        left = count

        def ended(conversation: Conversation) -> None:
            nonlocal left
            left -= 1
            if waiting:
                load.begin(conversation, waiting.pop())

        try:
            meter = Meter(pid)
            for conversation in load.all.values():
                load.begin(conversation, waiting.pop())
            while left:
                load.turn(ended)
            figures = meter.read()
            return figures | {"count": count, "tokens": load.tokens()[0], "connections": len(load.all)}
        finally:
            load.close()

    def _streams(self, address: str, key: str, pid: int, streams: int, window_s: float) -> dict[str, Any]:
        load = Load(address, streams)

        def ended(conversation: Conversation) -> None:
            raise BenchError("a stream ended that should not end")

        try:
            for conversation in load.all.values():
                load.begin(conversation, self._short(address, key, STREAM_TOKENS))
            while not all(conversation.tokens for conversation in load.all.values()):
                load.turn(ended)
            self._until(load, time.perf_counter() + _SETTLE_S, ended)
            meter, (tokens, events) = Meter(pid), load.tokens()
            self._until(load, time.perf_counter() + window_s, ended)
            figures = meter.read()
            tokens_after, events_after = load.tokens()
            return figures | {"tokens": tokens_after - tokens, "events": events_after - events}
        finally:
            load.close()

    def _whole(  # noqa: PLR0917 - an order by its fields
        self, address: str, key: str, pid: int, streams: int, chars: int, window_s: float
    ) -> dict[str, Any]:
        """Requests that begin one after the other, and each anew when it ends, so that at any time some are
        at each of their tokens. `requests` is the number of which the tokens came in the window."""
        if chars not in self._mean:
            self._mean[chars] = MeanRequests(self._texts, chars)
        mean = self._mean[chars]
        load = Load(address, streams)

        def again(conversation: Conversation) -> None:
            load.begin(conversation, request(mean.take(), address, key))

        try:
            waiting, began, lasts_s = list(load.all.values()), time.perf_counter(), MEAN_OUTPUT / TOKENS_PER_S
            while waiting:
                due = began + lasts_s * (streams - len(waiting)) / streams
                if (left := due - time.perf_counter()) > 0:
                    load.turn_within(left, again)
                else:
                    again(waiting.pop())
            self._until(load, time.perf_counter() + _SETTLE_S, again)
            meter, (tokens, _) = Meter(pid), load.tokens()
            self._until(load, time.perf_counter() + window_s, again)
            figures = meter.read()
            return figures | {"requests": (load.tokens()[0] - tokens) / MEAN_OUTPUT}
        finally:
            load.close()

    def _ttft(self, address: str, key: str, pid: int, count: int) -> dict[str, Any]:
        """An ordinary client: blocking, with the kernel's defaults."""
        times = []
        with connect(address, _PATIENCE_S) as sock:
            for number in range(count + 5):
                if number == 5:
                    meter = Meter(pid)
                data = self._short(address, key, AT_ONCE)
                began = time.perf_counter()
                sock.sendall(data)
                got, first = b"", 0.0
                while not got.endswith(_END):
                    more = sock.recv(1 << 16)
                    if not more:
                        raise BenchError(f"the connection was closed after {got[-200:]!r}")
                    got += more
                    if not first and _TOKEN in got:
                        first = time.perf_counter() - began
                if b" 200 " not in got[:20] or not first:
                    raise BenchError(got[:600].decode(errors="replace"))
                times.append(first)
                time.sleep(_PAUSE_S)
        return meter.read() | {"count": count, "ttft_s": statistics.median(times[5:])}

    def _short(self, address: str, key: str, tokens: int) -> bytes:
        self._asked += 1
        return request(payload(short_chat(self._asked), tokens), address, key)

    @staticmethod
    def _until(load: Load, end: float, ended: Callable[[Conversation], None]) -> None:
        while time.perf_counter() < end:
            load.turn(ended)


class Meter:
    """CPU of the process under test, CPU of this process, and time, since construction."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = (time.perf_counter(), time.process_time(), cpu_s(pid))

    def read(self) -> dict[str, Any]:
        """CPU and time since construction."""
        cpu = cpu_s(self._pid)
        wall, own, before = self._began
        return {
            "cpu_s": cpu - before,
            "wall_s": time.perf_counter() - wall,
            "client_cpu_s": time.process_time() - own,
        }


def main(lines: Sequence[str] | Any) -> None:
    """Execute every line."""
    client = Client()
    for line in lines:
        try:
            answer = client.obey(json.loads(line))
        except (BenchError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(iter(sys.stdin.readline, ""))
