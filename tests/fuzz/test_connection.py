"""Random bytes in random pieces: no exception, one response per request, bounded memory."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from load_tests.scenarios.scorecard.clients.http_cases import CASES
from tests.kit.gateway.connection_bench import Bench

from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.http.limits import HttpLimits

LIMITS = HttpLimits(body_bytes=20_000, header_bytes=4096, target_bytes=512, stream_buffer_bytes=4096)
MAX_PIECE = 2048

names = st.text("abcXYZ-", min_size=1, max_size=8).map(lambda s: f"X-{s}".encode())
values = st.binary(max_size=20).map(lambda b: bytes(c for c in b if 32 <= c != 127).strip())


@st.composite
def valid(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """A request that must be served: its bytes, target path and body."""
    path = b"/" + draw(st.text("abc/%20.", max_size=12)).encode()
    target = draw(st.sampled_from([path, path + b"?q=1", b"http://t" + path]))
    body = draw(st.binary(max_size=300))
    lines = [b"%b: %b\r\n" % (draw(names), draw(values)) for _ in range(draw(st.integers(0, 3)))]
    if draw(st.booleans()):
        lines.append(b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        wire = b"".join(b"%x;e=f\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n"
        wire += draw(st.sampled_from([b"", b"X-Trailer: y\r\n"])) + b"\r\n"
        lines.append(b"Transfer-Encoding: chunked\r\n")
    else:
        wire = body
        lines.append(b"Content-Length: %d\r\n" % len(body))
    order = draw(st.permutations(lines))
    start = draw(st.sampled_from([b"", b"\r\n"])) + b"POST %b HTTP/1.1\r\nHost: t\r\n" % target
    return start + b"".join(order) + b"\r\n" + wire, path, body


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A request with something wrong with it, or a piece of one, or noise."""
    data = draw(st.one_of(valid().map(lambda request: request[0]), st.sampled_from([c.data for c in CASES])))
    data = data[:6000]
    kind = draw(st.integers(0, 3))
    at = draw(st.integers(0, len(data)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + draw(st.integers(1, 5)) :]
    return draw(st.binary(max_size=200))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at each of `cuts`, taken around its length."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a != b]


def conversation(data: list[bytes]) -> tuple[list[tuple[str, str, bytes]], list[str], bytes]:
    """Requests that a handler saw, codes of refusals, and all that was sent."""
    seen: list[tuple[str, str, bytes]] = []

    def answer(exchange: Exchange) -> None:
        seen.append((exchange.request.method, exchange.request.path, exchange.request.body))
        exchange.respond(200, b"%d" % len(seen))

    bench = Bench(answer, LIMITS)
    for piece in data:
        bench.feed(piece)
    sent = bytes(bench.transport.sent)
    bench.later(1e3)
    bench.later(1e3)
    assert bench.transport.gone
    assert (bench.held_bytes, bench.open) == (0, False)
    return seen, [error.code for error in bench.refusals], sent


@given(st.lists(valid(), min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=12))
def test_requests_in_any_pieces_are_served_whole_in_order_and_answered_once(
    requests: list[tuple[bytes, bytes, bytes]], cuts: list[int]
) -> None:
    data = b"".join(wire for wire, _, _ in requests)
    seen, refusals, sent = conversation(pieces(data, cuts))
    assert refusals == []
    assert [(path, body) for _, path, body in seen] == [(path.decode(), body) for _, path, body in requests]
    assert sent.count(b"HTTP/1.1 200 ") == len(requests)


@given(
    st.lists(st.one_of(spoilt(), valid().map(lambda r: r[0])), max_size=3),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_how_bytes_are_cut_into_pieces_changes_nothing(data: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(data)
    assert conversation(pieces(whole, cuts))[:2] == conversation([whole] if whole else [])[:2]


class Peer(RuleBasedStateMachine):
    """A client that sends, stalls, reads slowly or leaves, and a handler that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Exchange] = []
        self.lost: list[str] = []
        self.unsent = b""
        self.bench = Bench(self._take, LIMITS, bodies_bytes=30_000)

    def _take(self, exchange: Exchange) -> None:
        exchange.on_gone = self.lost.append
        self.taken.append(exchange)

    def _current(self) -> Exchange | None:
        return next((exchange for exchange in self.taken if exchange.open), None)

    @rule(data=st.one_of(spoilt(), valid().map(lambda r: r[0])))
    def send(self, data: bytes) -> None:
        self.unsent += data

    @precondition(lambda self: self.unsent)
    @rule(size=st.integers(1, MAX_PIECE))
    def deliver(self, size: int) -> None:
        if self.bench.feed(self.unsent[:size]):
            self.unsent = self.unsent[size:]

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 20.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.bench.later(seconds)

    @rule(slow=st.booleans())
    def read(self, slow: bool) -> None:
        if self.bench.open and not self.bench.transport.gone:
            (self.bench.connection.pause_writing if slow else self.bench.connection.resume_writing)()
            self.bench.turn()

    @rule(body=st.binary(max_size=600))
    def respond(self, body: bytes) -> None:
        self._do(lambda exchange: None if exchange.streaming else exchange.respond(200, body))

    @rule(frame=st.binary(min_size=1, max_size=600))
    def stream(self, frame: bytes) -> None:
        self._do(lambda exchange: exchange.frame(frame) if exchange.streaming else exchange.begin(frame))

    @rule()
    def end(self) -> None:
        self._do(lambda exchange: exchange.end(b"") if exchange.streaming else None)

    def _do(self, step: Callable[[Exchange], None]) -> None:
        exchange = self._current()
        if exchange is not None:
            step(exchange)
            self.bench.turn()

    @rule()
    def drain(self) -> None:
        if self.bench.open:
            self.bench.connection.close_when_idle()
            self.bench.turn()

    @rule()
    def leave(self) -> None:
        self.bench.transport.gone = True
        self.bench.turn()

    @invariant()
    def each_request_is_answered_at_most_once_and_one_at_a_time(self) -> None:
        begun = bytes(self.bench.transport.sent).count(b"HTTP/1.1 ")
        assert begun <= len(self.taken) + len(self.bench.refusals) + self._continues()
        assert sum(exchange.open for exchange in self.taken) <= 1
        assert len(self.bench.refusals) <= 1

    def _continues(self) -> int:
        return bytes(self.bench.transport.sent).count(b"HTTP/1.1 100 ")

    @invariant()
    def memory_is_bounded(self) -> None:
        connection = self.bench.connection
        assert 0 <= self.bench.held_bytes <= LIMITS.body_bytes + MAX_PIECE
        assert len(connection._waiting) <= 8
        assert len(connection._backlog) <= LIMITS.stream_buffer_bytes

    @invariant()
    def nothing_is_held_after_the_end(self) -> None:
        if not self.bench.open:
            assert self.bench.held_bytes == 0
            assert not any(exchange.open for exchange in self.taken)


TestPeer = Peer.TestCase
TestPeer.settings = settings(stateful_step_count=40, deadline=None)
