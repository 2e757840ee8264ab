"""Pages of listed origins may call the API, others may not; an open gateway refuses browsers' cross-origin
requests."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvasir.config.spec.edge import CorsSpec
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.cors import Cors

CHAT = "https://chat.example.com"
LISTED = CorsSpec(origins=(CHAT,))


def asking(origin: str, **headers: str) -> dict[bytes, bytes]:
    given = {"origin": origin, "access-control-request-method": "POST"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return {name.encode(): value.encode() for name, value in given.items()}


def fields(lines: bytes) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines.decode().split("\r\n") if line)


def test_by_default_no_page_is_told_anything() -> None:
    cors = Cors(CorsSpec())
    assert not cors.enabled
    assert cors.lines(asking(CHAT)) == b""


def test_a_listed_origin_may_read_answers_and_caches_keep_origins_apart() -> None:
    cors = Cors(LISTED)
    told = fields(cors.lines({b"origin": CHAT.encode()}))
    assert told["access-control-allow-origin"] == CHAT
    assert told["vary"] == "origin"
    assert "x-request-id" in told["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in told
    for other in ({b"origin": b"https://evil.example"}, {b"origin": b"null"}, {}):
        assert fields(cors.lines(other)) == {"vary": "origin"}


def test_a_preflight_allows_the_headers_that_the_page_wants_to_send() -> None:
    wanted = "authorization, content-type, x-stainless-lang"
    told = Cors(LISTED).preflight(asking(CHAT, access_control_request_headers=wanted))
    assert told is not None
    assert fields(told)["access-control-allow-headers"] == wanted
    assert fields(told)["access-control-max-age"] == "600"
    assert "POST" in fields(told)["access-control-allow-methods"]


@pytest.mark.parametrize("headers", ["a\x00b", "x" * 65, ", ".join(["x"] * 65), "a b", ""])
def test_headers_that_are_no_names_are_not_repeated(headers: str) -> None:
    told = Cors(LISTED).preflight(asking(CHAT, access_control_request_headers=headers))
    assert told is not None
    assert b"allow-headers" not in told


def test_a_preflight_of_another_origin_is_refused_and_an_ordinary_request_is_none() -> None:
    with pytest.raises(RequestError) as caught:
        Cors(LISTED).preflight(asking("https://evil.example"))
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")
    assert Cors(LISTED).preflight({b"origin": CHAT.encode()}) is None


def test_every_origin_goes_without_credentials_only() -> None:
    told = fields(Cors(CorsSpec(origins=("*",))).lines(asking("https://any.example")))
    assert told["access-control-allow-origin"] == "*"
    with pytest.raises(ValidationError, match="credentials cannot be combined with the origin"):
        CorsSpec(origins=("*",), credentials=True)
    told = fields(Cors(CorsSpec(origins=(CHAT,), credentials=True)).lines(asking(CHAT)))
    assert told["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "a.example", "https://A.example", "null", "https://a b"]
)
def test_an_origin_that_no_browser_spells_so_is_refused_in_the_spec(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        CorsSpec(origins=(origin,))


@pytest.mark.parametrize(
    ("origin", "host", "welcome"),
    [
        (None, "anything.example", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://localhost:8000", "localhost:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        (CHAT, "127.0.0.1:8000", True),
        ("https://evil.example", "127.0.0.1:8000", False),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", False),
        ("null", "127.0.0.1:8000", False),
        ("http://rebound.example:8000", "rebound.example:8000", False),
    ],
)
def test_without_keys_a_foreign_page_may_send_nothing(origin: str | None, host: str, welcome: bool) -> None:
    headers = {b"host": host.encode()} | ({} if origin is None else {b"origin": origin.encode()})
    guarded, keyed = Cors(LISTED, open_to_all=True), Cors(LISTED)
    keyed.check(headers)
    if welcome:
        guarded.check(headers)
    else:
        with pytest.raises(RequestError, match="may not call the API"):
            guarded.check(headers)
