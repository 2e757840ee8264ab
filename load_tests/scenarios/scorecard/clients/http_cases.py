"""HTTP requests that violate the protocol or use its limits, with the expected answer and the state of the
connection afterwards. Tests and the scorecard send the same cases, directly and through a proxy.

If the connection stays open after a case, the next request on it must get its own answer. This detects two
parties that disagree about where a message ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

CANARY = "/health/live"
_LIVE = b"GET /health/live HTTP/1.1\r\nHost: t\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n"
_SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"
_MAX_ANSWER = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """The bytes, the statuses of the final answers in order, whether the connection is closed afterwards, and
    the code of the last answer if it is an error. With `head`, answers have no body."""

    name: str
    data: bytes
    statuses: tuple[int, ...] = (400,)
    closes: bool = True
    code: str = "malformed_http"
    head: bool = False


def _served(name: str, data: bytes, *statuses: int, code: str = "", head: bool = False) -> Case:
    """A case whose connection stays open."""
    return Case(name, data, statuses or (200,), closes=False, code=code, head=head)


def _one(start: bytes, headers: bytes = b"", body: bytes = b"") -> bytes:
    return start + headers + b"\r\n" + body


_FRAMING = (
    Case("length and coding", _one(_CHUNKED, b"Content-Length: 3\r\n", b"0\r\n\r\n" + _SMUGGLED)),
    Case(
        "coding after length",
        _one(_POST, b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + _SMUGGLED),
    ),
    Case("two lengths", _one(_POST, b"Content-Length: 3\r\nContent-Length: 40\r\n", b"abc" + _SMUGGLED)),
    Case("two equal lengths", _one(_POST, b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc")),
    Case("a list of lengths", _one(_POST, b"Content-Length: 3, 3\r\n", b"abc")),
    Case("a signed length", _one(_POST, b"Content-Length: +3\r\n", b"abc")),
    Case("a negative length", _one(_POST, b"Content-Length: -1\r\n")),
    Case("a hexadecimal length", _one(_POST, b"Content-Length: 0x3\r\n", b"abc")),
    Case("a length with a space within", _one(_POST, b"Content-Length: 3 3\r\n", b"abc")),
    Case("a length with an underscore", _one(_POST, b"Content-Length: 1_0\r\n", b"abcdefghij")),
    Case("a length with a vertical tab", _one(_POST, b"Content-Length: 3\x0b\r\n", b"abc")),
    Case("an empty length", _one(_POST, b"Content-Length: \r\n")),
    Case("a length beyond 64 bits", _one(_POST, b"Content-Length: 99999999999999999999\r\n")),
    Case(
        "a length beyond the limit",
        _one(_POST, b"Content-Length: 99999999\r\n"),
        (413,),
        code="body_too_large",
    ),
    _served(
        "a length with a leading zero",
        _one(_POST, b"Content-Length: 05\r\n", b"abcde"),
        400,
        code="invalid_json",
    ),
    Case("a space before the colon of the length", _one(_POST, b"Content-Length : 3\r\n", b"abc")),
    Case(
        "a space before the colon of the coding",
        _one(_POST, b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n"),
    ),
    Case(
        "an unknown coding",
        _one(_POST, b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
        (501,),
        code="unsupported_transfer_encoding",
    ),
    Case(
        "a coding before chunked",
        _one(_POST, b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
        (501,),
        code="unsupported_transfer_encoding",
    ),
    Case("a coding after chunked", _one(_POST, b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n")),
    Case("chunked twice", _one(_POST, b"Transfer-Encoding: chunked, chunked\r\n", b"0\r\n\r\n")),
    Case("two codings in two headers", _one(_CHUNKED, b"Transfer-Encoding: identity\r\n", b"0\r\n\r\n")),
    Case("a coding behind a vertical tab", _one(_POST, b"Transfer-Encoding:\x0bchunked\r\n", b"0\r\n\r\n")),
    Case("a coding on a folded line", _one(_POST, b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n")),
    Case(
        "a coding in HTTP/1.0",
        b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    _served(
        "a coding in capitals",
        _one(_POST, b"Transfer-Encoding: CHUNKED\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
        400,
        code="invalid_json",
    ),
    _served(
        "a chunk with an extension",
        _one(_CHUNKED, b"", b'3;a=b;c="d"\r\nabc\r\n0\r\nTrailer: x\r\n\r\n'),
        400,
        code="invalid_json",
    ),
    Case("chunks that end in a bare LF", _one(_CHUNKED, b"", b"3\nabc\n0\n\n")),
    Case("an extension that ends in a bare LF", _one(_CHUNKED, b"", b"3;\nabc\r\n0\r\n\r\n")),
    Case("a bare CR in an extension", _one(_CHUNKED, b"", b"3;a\rb\r\nabc\r\n0\r\n\r\n")),
    Case("a chunk longer than its size", _one(_CHUNKED, b"", b"1\r\nabc\r\n0\r\n\r\n")),
    Case("a negative chunk", _one(_CHUNKED, b"", b"-3\r\nabc\r\n0\r\n\r\n")),
    Case("a chunk size with 0x", _one(_CHUNKED, b"", b"0x3\r\nabc\r\n0\r\n\r\n")),
    Case("a chunk size with a space", _one(_CHUNKED, b"", b"3 \r\nabc\r\n0\r\n\r\n")),
    Case("a chunk size beyond 64 bits", _one(_CHUNKED, b"", b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n")),
    Case("a chunk size of no digits", _one(_CHUNKED, b"", b"zz\r\n")),
    Case("a length among the trailers", _one(_CHUNKED, b"", b"0\r\nContent-Length: 5\r\n\r\n" + _SMUGGLED)),
    Case(
        "a bomb of extensions",
        _one(_CHUNKED, b"", (b"1;" + b"x" * 8000 + b"\r\na\r\n") * 40),
        (413,),
        code="body_too_large",
    ),
    Case(
        "a bomb of trailers",
        _one(_CHUNKED, b"", b"0\r\n" + b"X: y\r\n" * 200 + b"\r\n"),
        (431,),
        code="headers_too_large",
    ),
    _served("a body to GET", _one(_LIVE, b"Content-Length: 3\r\n", b"abc")),
)

_LINES = (
    Case("lines that end in a bare LF", b"GET /health/live HTTP/1.1\nHost: t\n\n"),
    Case("one header that ends in a bare LF", _one(_LIVE, b"X: a\nY: b\r\n")),
    Case("a bare LF at the end of the headers", _LIVE + b"\n"),
    Case("a bare CR in a header", _one(_LIVE, b"X: a\rb\r\n")),
    Case("a bare CR after the request line", b"GET /health/live HTTP/1.1\rHost: t\r\n\r\n"),
    Case("a folded header", _one(_LIVE, b"X: a\r\n b\r\n")),
    Case("a header folded by a tab", _one(_LIVE, b"X: a\r\n\tb\r\n")),
    Case("a space before the first header", b"GET /health/live HTTP/1.1\r\n Host: t\r\n\r\n"),
    Case("a space in a name", _one(_LIVE, b"Content Length: 5\r\n")),
    Case("no name", _one(_LIVE, b": 5\r\n")),
    Case("no colon", _one(_LIVE, b"nonsense\r\n")),
    Case("NUL in a name", _one(_LIVE, b"\x00X: 5\r\n")),
    Case("NUL in a value", _one(_LIVE, b"X: \x00\r\n")),
    Case("a byte beyond ASCII in a name", _one(_LIVE, b"X\xff: a\r\n")),
    Case("a control character in a value", _one(_LIVE, b"X: \x01\r\n")),
    Case(
        "an endless header", _one(_LIVE, b"X: " + b"a" * 70_000 + b"\r\n"), (431,), code="headers_too_large"
    ),
    Case("too many headers", _one(_LIVE, b"X: a\r\n" * 200), (431,), code="headers_too_large"),
    _served("empty lines before the request", b"\r\n\r\n" + _one(_LIVE)),
    Case("TLS where plain text is spoken", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
)

_STARTS = (
    Case("no Host", b"GET /health/live HTTP/1.1\r\n\r\n", code="missing_host"),
    Case("two Hosts", _one(_LIVE, b"Host: t\r\n"), code="missing_host"),
    Case("a Host that is none", b"GET /health/live HTTP/1.1\r\nHost: a b/c\r\n\r\n", code="missing_host"),
    Case("a Host with a user", b"GET /health/live HTTP/1.1\r\nHost: a@t\r\n\r\n", code="missing_host"),
    Case(
        "HTTP/2.0", b"GET /health/live HTTP/2.0\r\nHost: t\r\n\r\n", (505,), code="http_version_not_supported"
    ),
    Case(
        "HTTP/0.9 by name",
        b"GET /health/live HTTP/0.9\r\nHost: t\r\n\r\n",
        (505,),
        code="http_version_not_supported",
    ),
    Case("HTTP/1.2", b"GET /health/live HTTP/1.2\r\nHost: t\r\n\r\n"),
    Case("HTTP/9.9", b"GET /health/live HTTP/9.9\r\nHost: t\r\n\r\n"),
    Case("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Case("an unknown method", b"FROB /health/live HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case("a method in small letters", b"get /health/live HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case("a tab after the method", b"GET\t/health/live HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case("a space after the version", b"GET /health/live HTTP/1.1 \r\nHost: t\r\n\r\n"),
    Case("a target that is no path", b"GET health/live HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case("a star to GET", b"GET * HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case("a byte beyond ASCII in the target", b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case(
        "an endless target",
        b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n",
        (414,),
        code="target_too_long",
    ),
    Case(
        "CONNECT",
        b"CONNECT t:443 HTTP/1.1\r\nHost: t:443\r\n\r\n" + _SMUGGLED,
        (405,),
        code="method_not_allowed",
    ),
    _served("TRACE", b"TRACE /health/live HTTP/1.1\r\nHost: t\r\n\r\n", 405, code="method_not_allowed"),
    _served("an absolute target", b"GET http://t/health/live?x=1 HTTP/1.1\r\nHost: t\r\n\r\n"),
    Case("an absolute target with a user", b"GET http://a@t/health/live HTTP/1.1\r\nHost: t\r\n\r\n"),
    _served("OPTIONS of a path", b"OPTIONS /health/live HTTP/1.1\r\nHost: t\r\n\r\n", 204),
    _served("OPTIONS of all", b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n", 204),
    _served("HEAD", b"HEAD /health/live HTTP/1.1\r\nHost: t\r\n\r\n", head=True),
    Case("HEAD without a Host", b"HEAD /health/live HTTP/1.1\r\n\r\n", head=True, code=""),
    Case("HTTP/1.0", b"GET /health/live HTTP/1.0\r\n\r\n", (200,), code=""),
)

_MANNERS = (
    _served("an offer of a web socket", _one(_LIVE, b"Connection: upgrade\r\nUpgrade: websocket\r\n")),
    _served(
        "an offer of HTTP/2, with a body",
        _one(
            _POST,
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
            b"Content-Length: 3\r\n",
            b"abc",
        ),
        400,
        code="invalid_json",
    ),
    _served(
        "an offer of HTTP/2, in chunks",
        _one(_CHUNKED, b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
        400,
        code="invalid_json",
    ),
    Case(
        "an offer of HTTP/2, in HTTP/1.0 and chunks",
        b"POST /v1/completions HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ),
    Case(
        "an offer to upgrade from HTTP/2.0",
        b"GET /health/live HTTP/2.0\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        (505,),
        code="http_version_not_supported",
    ),
    _served("two requests in one piece", _one(_LIVE) * 2, 200, 200),
    _served(
        "a body and a request in one piece",
        _one(_POST, b"Content-Length: 3\r\n", b"abc") + _one(_LIVE),
        400,
        200,
    ),
    Case(
        "a request after one that closes", _one(_LIVE, b"Connection: close\r\n") + _SMUGGLED, (200,), code=""
    ),
    Case(
        "an empty line after one that closes",
        _one(_LIVE, b"Connection: close\r\n") + b"\r\n",
        (200,),
        code="",
    ),
    Case("to keep and to close", _one(_LIVE, b"Connection: keep-alive, close\r\n"), (200,), code=""),
    _served(
        "an expectation that is met",
        _one(_POST, b"Expect: 100-continue\r\nContent-Length: 3\r\n", b"abc"),
        400,
        code="invalid_json",
    ),
    Case(
        "another expectation",
        _one(_POST, b"Expect: magic\r\nContent-Length: 1\r\n"),
        (417,),
        code="expectation_failed",
    ),
    Case(
        "an expectation for what is too large",
        _one(_POST, b"Expect: 100-continue\r\nContent-Length: 99999999\r\n"),
        (413,),
        code="body_too_large",
    ),
    Case(
        "an expectation where nothing is",
        _one(b"POST /nowhere HTTP/1.1\r\nHost: t\r\n", b"Expect: 100-continue\r\nContent-Length: 3\r\n"),
        (404,),
        code="not_found",
    ),
    Case("two keys", _one(_LIVE, b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n")),
    Case("two types", _one(_POST, b"Content-Type: a\r\nContent-Type: b\r\nContent-Length: 0\r\n")),
)

CASES: tuple[Case, ...] = (*_FRAMING, *_LINES, *_STARTS, *_MANNERS)


@dataclass(frozen=True, slots=True)
class Answer:
    """One final answer: status, `x-request-id` and body."""

    status: int
    request_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of a case: its answers, whether the connection was closed, and whether the canary request
    after it got its own answer (None if the connection was closed)."""

    answers: tuple[Answer, ...]
    closed: bool
    canary: bool | None


def canary(request_id: str) -> bytes:
    """A request whose answer differs from all others."""
    return f"GET {CANARY} HTTP/1.1\r\nHost: t\r\nX-Request-Id: {request_id}\r\n\r\n".encode()


async def read_answer(reader: asyncio.StreamReader, *, head: bool = False) -> Answer:
    """Return the next final answer. Raise EOFError (IncompleteReadError) or ConnectionError at the end."""
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        if status >= 200:
            break
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    body = b""
    if fields.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif not head and status != 204:
        body = await reader.readexactly(min(int(fields.get("content-length", "0")), _MAX_ANSWER))
    return Answer(status, fields.get("x-request-id", ""), body)


async def send(host: str, port: int, case: Case, canary_id: str, patience_s: float = 5.0) -> Seen:
    """Send a case on its own connection and return the result. Raise TimeoutError if the peer neither answers
    nor closes."""
    reader, writer = await asyncio.open_connection(host, port)
    answers: list[Answer] = []
    try:
        async with asyncio.timeout(patience_s):
            try:
                writer.write(case.data)
                for _ in case.statuses:
                    answers.append(await read_answer(reader, head=case.head))
                if case.closes:
                    return Seen(tuple(answers), await reader.read() == b"", None)
                writer.write(canary(canary_id))
                own = await read_answer(reader)
            except (EOFError, ConnectionError):
                return Seen(tuple(answers), True, None)
            return Seen(tuple(answers), False, (own.status, own.request_id) == (200, canary_id))
    finally:
        writer.close()
