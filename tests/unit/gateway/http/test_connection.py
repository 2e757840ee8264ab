"""Deadlines and limits of one connection, with a clock and a peer that the test controls."""

from __future__ import annotations

import errno
import weakref

import pytest
from tests.kit.gateway.connection_bench import Bench

from kvasir.collector import gc_paused
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.http.limits import HttpLimits

LIMITS = HttpLimits(header_s=8.0, body_s=30.0, idle_s=75.0, body_rate=1024)
GET = b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n"


class Server(Bench):
    """A connection whose handler keeps exchanges, or answers them at once."""

    def __init__(
        self, limits: HttpLimits = LIMITS, *, at_once: bool = True, bodies_bytes: int = 1 << 30
    ) -> None:
        self.taken: list[Exchange] = []
        self._at_once = at_once
        super().__init__(self._take, limits, bodies_bytes)

    def _take(self, exchange: Exchange) -> None:
        self.taken.append(exchange)
        if self._at_once:
            exchange.respond(200, b"{}")

    @property
    def sent(self) -> bytes:
        """All that was sent."""
        return bytes(self.transport.sent)

    @property
    def codes(self) -> list[str]:
        """Of refusals."""
        return [error.code for error in self.refusals]


def post(body: bytes, headers: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\nHost: t\r\n%bContent-Length: %d\r\n\r\n%b" % (headers, len(body), body)


def test_empty_lines_do_not_keep_a_connection() -> None:
    server = Server()
    for _ in range(4):
        server.feed(b"\r\n")
        server.later(2.1)
    assert server.transport.gone
    assert (server.sent, server.refusals) == (b"", [])


def test_a_request_that_begins_in_the_piece_of_another_has_the_deadline_of_headers() -> None:
    server = Server()
    server.feed(GET + b"GET /y HTT")
    for _ in range(4):
        server.feed(b"")
        server.later(2.1)
    assert server.codes == ["header_timeout"]


def test_a_body_that_trickles_is_cut_long_before_its_time_and_a_steady_one_is_not() -> None:
    trickle, steady = Server(), Server()
    for server in (trickle, steady):
        server.feed(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 40000\r\n\r\n")
    for second in range(1, 31):
        trickle.feed(b"a" * 100)
        steady.feed(b"a" * 1100)
        trickle.later(1.0)
        steady.later(1.0)
        if second == 9:
            assert trickle.codes == ["body_timeout"]
        if second == 29:
            assert steady.codes == []
    assert steady.codes == ["body_timeout"]


def test_requests_that_follow_each_other_without_a_gap_are_not_taken_for_one() -> None:
    server = Server(HttpLimits(header_bytes=4096))
    data = GET * 1000
    for at in range(0, len(data), 999):
        server.feed(data[at : at + 999])
    assert (len(server.taken), server.refusals) == (1000, [])


def test_a_body_is_let_go_of_when_it_is_handed_over_and_pipelined_ones_share_one_bound() -> None:
    server = Server(HttpLimits(body_bytes=10_000), at_once=False)
    server.feed(post(b"a" * 9000))
    assert server.held_bytes == 0
    server.feed(post(b"b" * 6000))
    assert server.held_bytes == 6000
    server.feed(post(b"c" * 6000))
    assert server.transport.gone
    assert server.held_bytes == 0


def test_bodies_beyond_the_bound_of_all_are_refused_with_a_time_to_come_back() -> None:
    server = Server(bodies_bytes=5000)
    server.feed(post(b"a" * 4000))
    server.feed(post(b"a" * 6000))
    assert server.codes == ["bodies_full"]
    assert b"HTTP/1.1 503" in server.sent
    assert b"\r\nretry-after: 1\r\n" in server.sent
    assert server.held_bytes == 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"a" * 100_000),
        post(b"a", b"Expect: 100-continue\r\n"),
        b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    ],
)
def test_a_body_that_nobody_wants_is_refused_before_it_is_read(request_bytes: bytes) -> None:
    def unwelcome(request: HttpRequest) -> None:
        assert (request.method, request.path, request.body) == ("POST", "/x", b"")
        raise RequestError("Who are you?", status=401, code="invalid_api_key")

    server = Server()
    server.early = unwelcome
    server.feed(request_bytes)
    assert (server.codes, server.taken, server.held_bytes) == (["invalid_api_key"], [], 0)
    assert server.sent.startswith(b"HTTP/1.1 401 ")
    assert b'www-authenticate: Bearer realm="kvasir"\r\n' in server.sent


def test_a_small_body_is_not_asked_about_twice() -> None:
    server = Server()
    server.early = lambda _: pytest.fail("asked")
    server.feed(post(b"a" * 1000))
    assert len(server.taken) == 1


def test_what_follows_a_last_request_does_not_cut_its_stream() -> None:
    server = Server(at_once=False)
    server.feed(post(b"{}", b"Connection: close\r\n"))
    server.taken[0].begin(b"data: a\n\n")
    server.feed(b"\r\nGET /smuggled HTTP/1.1\r\n")
    server.taken[0].end(b"data: b\n\n")
    server.turn()
    assert server.sent.endswith(b"data: b\n\n\r\n0\r\n\r\n")
    assert len(server.taken) == 1


def test_a_client_that_goes_on_sending_after_a_refusal_is_cut_at_a_bound() -> None:
    server = Server(HttpLimits(body_bytes=10_000))
    server.feed(post(b"").replace(b": 0", b": 20000"))
    assert server.codes == ["body_too_large"]
    for _ in range(4):
        assert server.feed(b"a" * 5000)
    assert not server.transport.gone
    server.feed(b"a")
    assert server.transport.gone


def test_draining_lets_a_request_that_has_begun_be_answered() -> None:
    idle, begun = Server(), Server()
    begun.feed(GET[:10])
    for server in (idle, begun):
        server.connection.close_when_idle()
        server.turn()
    assert idle.transport.gone
    begun.feed(GET[10:])
    assert b"connection: close\r\n" in begun.sent
    assert begun.transport.gone


def test_nothing_is_served_after_an_answer_that_closes_even_when_it_came_in_the_same_piece() -> None:
    server = Server(at_once=False)

    def close_after(exchange: Exchange) -> None:
        server.taken.append(exchange)
        exchange.begin(b"a")
        exchange.end(b"b", close=True)

    server.handle = close_after
    server.feed(GET + post(b"abc"))
    assert len(server.taken) == 1
    assert server.transport.gone
    assert (server.sent.count(b"HTTP/1.1 "), server.refusals, server.held_bytes) == (1, [], 0)


def test_a_request_that_waits_for_a_word_before_its_body_gets_it_when_its_turn_comes() -> None:
    server = Server(at_once=False)
    server.feed(GET)
    server.feed(b"POST /y HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
    assert server.sent == b""
    server.taken[0].respond(200, b"{}")
    assert server.sent.endswith(b"{}HTTP/1.1 100 Continue\r\n\r\n")
    server.feed(b"a")
    assert server.taken[1].request.body == b"a"


def test_a_stream_hears_that_its_client_lags_and_that_it_has_caught_up() -> None:
    heard: list[str] = []
    server = Server(at_once=False)
    server.feed(post(b"{}"))
    stream = server.taken[0]
    stream.on_caught_up = lambda: heard.append("caught up")
    stream.begin(b"a")
    server.connection.pause_writing()
    assert stream.lagging
    stream.frame(b"b")
    server.connection.resume_writing()
    assert not stream.lagging
    assert heard == ["caught up"]
    assert server.sent.endswith(b"1\r\na\r\n1\r\nb\r\n")


def test_an_absolute_target_and_an_offer_to_upgrade_are_served_as_the_plain_request() -> None:
    server = Server()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    server.feed(post(b"abc", offer).replace(b"/x", b"http://t/x?q") + GET)
    assert [(e.request.method, e.request.path, e.request.body) for e in server.taken] == [
        ("POST", "/x", b"abc"),
        ("GET", "/x", b""),
    ]
    assert not server.transport.gone


def test_a_body_with_too_many_values_is_refused_before_all_of_it_is_there() -> None:
    server = Server()
    server.feed(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 4000000\r\n\r\n" + b"[]," * 50_000)
    assert server.codes == ["body_too_complex"]
    assert server.sent.startswith(b"HTTP/1.1 400 ")
    assert not server.taken


@pytest.mark.parametrize("target", [b"/x", b"http://t/x", b"t:443", b"*"])
def test_a_proxys_method_is_refused_once(target: bytes) -> None:
    server = Server()
    server.feed(b"CONNECT %b HTTP/1.1\r\nHost: t\r\n\r\n" % target)
    assert server.codes == ["method_not_allowed"]
    assert server.sent.count(b"HTTP/1.1") == 1
    assert not server.taken
    assert server.transport.half


def test_a_client_that_sends_no_more_gets_the_answers_that_are_due() -> None:
    server = Server(at_once=False)
    server.feed(post(b"{}") + GET)
    server.ends()
    assert not server.transport.gone
    assert server.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    server.later(1.0)
    assert server.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    server.later(100.0)
    assert server.sent == b"HTTP/1.1 100 Continue\r\n\r\n" * 2, "the second reports what the first met"
    for number in range(2):
        server.taken[number].respond(200, b"{}")
        server.turn()
    assert server.sent.count(b"HTTP/1.1 200 OK") == 2
    assert server.transport.gone


@pytest.mark.parametrize("away_s", [0.0, 0.1, 0.4])
def test_a_client_that_has_left_is_noticed_soon_after_its_reset(away_s: float) -> None:
    server = Server(at_once=False)
    server.feed(post(b"{}"))
    gone: list[str] = []
    server.taken[0].on_gone = gone.append
    server.ends()
    server.later(away_s)
    assert not gone
    server.transport.socket.error = errno.ECONNRESET
    server.later(max(0.01, 1.1 * away_s))
    assert gone == ["client_closed"]
    assert server.transport.gone
    server.later(100.0)
    assert server.sent == b"HTTP/1.1 100 Continue\r\n\r\n", "nothing is written to it any more"


def test_a_stream_that_begins_after_its_client_sends_no_more_is_sent_and_one_that_has_begun_ends() -> None:
    after, before = Server(at_once=False), Server(at_once=False)
    gone: list[str] = []
    for server in (after, before):
        server.feed(post(b"{}"))
    before.taken[0].on_gone = gone.append
    before.taken[0].begin(b"a")
    for server in (after, before):
        server.ends()
    assert before.transport.gone
    assert gone == ["client_closed"]
    after.taken[0].begin(b"a")
    begun = after.sent
    after.later(1.1)
    assert after.sent == begun
    after.taken[0].end(b"b")
    assert after.sent.endswith(b"0\r\n\r\n")
    assert after.transport.gone


def test_a_client_that_ends_without_a_request_or_in_http_1_0_has_left() -> None:
    idle, part, old = Server(), Server(), Server(at_once=False)
    part.feed(b"GET /x HTT")
    old.feed(b"GET /x HTTP/1.0\r\n\r\n")
    gone: list[str] = []
    old.taken[0].on_gone = gone.append
    for server in (idle, part, old):
        server.ends()
        assert server.transport.gone
        assert server.sent == b""
    assert gone == ["client_closed"]


def test_a_closed_connection_is_freed_without_the_garbage_collector() -> None:
    server = Server()
    server.feed(GET)
    server.taken.clear()
    lost = weakref.ref(server.connection)
    with gc_paused():
        server.connection.connection_lost(None)
        del server.connection
        assert lost() is None
