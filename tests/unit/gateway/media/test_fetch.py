"""Images that clients name by URL are fetched from listed origins only, and within bounds."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError
from tests.kit.media.image_files import data_url, png

from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.media.inputs import ImagesSpec
from kvasir.config.spec.routing import SloSpec
from kvasir.config.spec.tenants import TenantSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir_platform.gateway.catalog.slo_classes import SloClasses
from kvasir_platform.gateway.media.fetch import MediaFetches
from kvasir_platform.gateway.openai.schema.chat import ChatBody, ContentPart, ImageUrl, Message
from kvasir_platform.gateway.openai.schema.media_parts import HeldMedia
from kvasir_platform.gateway.tenants.caller import Caller
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.gateway.tenants.salts import Open

RED = png(8, 8)
OWN = data_url(RED)


def answer(body: bytes, status: str = "200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status.encode(), more, len(body), body)


def chat(*urls: str) -> ChatBody:
    text = ContentPart(type="text", text="What is this?")
    parts = [ContentPart(type="image_url", image_url=ImageUrl(url=url)) for url in urls]
    return ChatBody(
        model="m",
        messages=[Message(role="system", content="x"), Message(role="user", content=[*parts, text])],
    )


class Host:
    """A host of images, and what was asked of it."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self.heads: list[bytes] = []
        self.origin = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        if self.reply:
            writer.write(self.reply)
        else:
            await reader.read()
        writer.close()


@asynccontextmanager
async def host(reply: bytes) -> AsyncIterator[Host]:
    made = Host(reply)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


def fetches(*origins: str, **spec: Any) -> MediaFetches:
    known = {"url_origins": origins, "url_private_address": True, "max_bytes": 4096, **spec}
    return MediaFetches(GatewaySpec.model_validate({"image_inputs": known}), now=time.monotonic)


def tenant(**limits: Any) -> Caller:
    spec = TenantSpec.model_validate({"name": "red", **limits})
    slo = SloClasses([SloSpec(name="default")])
    return Caller(spec, 0, slo, Open(), MemoryLimits(lambda: 1000.0), now=lambda: 1000.0)


async def fetched(
    by: MediaFetches, body: ChatBody, caller: Caller | None = None, held: HeldMedia | None = None
) -> tuple[ChatBody, int]:
    """What is fetched for a chat. Raises what it fails with."""
    assert by.wanted(body)
    ended: asyncio.Future[tuple[ChatBody, int]] = asyncio.get_running_loop().create_future()
    by.begin(
        body,
        tenant() if caller is None else caller,
        HeldMedia(1 << 20) if held is None else held,
        lambda *done: ended.set_result(done),
        ended.set_exception,
    )
    return await ended


async def test_a_listed_origin_is_fetched_as_if_the_image_had_been_sent() -> None:
    async with host(answer(RED)) as images:
        body, size = await fetched(fetches(images.origin), chat(OWN, f"{images.origin}/cat.png?size=1"))
        assert size == len(RED)
        content = body.messages[1].content
        assert isinstance(content, list)
        urls = [part.image_url.url for part in content if part.image_url is not None]
        assert urls[0] == OWN
        assert base64.b64decode(urls[1].partition(",")[2]) == RED
        assert content[2].text == "What is this?"
        (head,) = images.heads
        assert head.startswith(b"GET /cat.png?size=1 HTTP/1.1\r\n")
        assert b"authorization" not in head.lower()


def test_nothing_is_fetched_from_elsewhere() -> None:
    by = fetches("https://images.example.com", max_images=2)
    ours = "https://images.example.com/a.png"
    assert by.wanted(chat(ours, OWN))
    assert not by.wanted(chat(OWN))
    assert not by.wanted(chat(ours, OWN, OWN))
    for url in (
        "https://images.example.com:8443/a.png",
        "http://images.example.com/a.png",
        "https://images.example.com.evil.example/a.png",
        "https://images.example.com@evil.example/a.png",
        "https://evil.example/?https://images.example.com/",
        "https://169.254.169.254/latest",
        "file:///etc/passwd",
        "//images.example.com/a.png",
    ):
        assert not by.wanted(chat(url))
        # One URL that is refused refuses the chat, before anything is fetched.
        assert not by.wanted(chat(ours, url))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer(b"", "404 Not Found"), "status 404"),
        (answer(b"", "302 Found", b"location: http://169.254.169.254/\r\n"), "status 302"),
        (answer(RED + bytes(4096)), "too large"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\nhalf", "broke off"),
        (b"", "did not arrive within"),
    ],
)
async def test_what_cannot_be_fetched_is_said_and_not_followed(reply: bytes, reason: str) -> None:
    async with host(reply) as images:
        by = fetches(images.origin, url_timeout_s=0.3)
        with pytest.raises(RequestError, match=reason) as caught:
            await fetched(by, chat(f"{images.origin}/x"))
        assert caught.value.code == "image_fetch_failed"
        assert caught.value.param == "messages[1].content[0].image_url.url"
        await by.close()


async def test_a_listed_name_that_leads_to_a_metadata_service_is_not_connected_to() -> None:
    async def resolve(_host: str, _port: int) -> list[str]:
        return ["169.254.169.254"]

    spec = GatewaySpec(image_inputs=ImagesSpec(url_origins=("https://images.example.com",)))
    by = MediaFetches(spec, now=time.monotonic, resolve=resolve)
    with pytest.raises(RequestError, match="metadata service"):
        await fetched(by, chat("https://images.example.com/a.png"))


async def test_chats_that_wait_for_images_are_bounded_and_end_with_the_gateway() -> None:
    async with host(b"") as images:
        by = fetches(images.origin, url_timeout_s=60)
        body, caller, held = chat(f"{images.origin}/x"), tenant(), HeldMedia(1)
        failed: list[BaseException] = []
        for _ in range(64):
            by.begin(body, caller, held, lambda *_: None, failed.append)
        assert failed == []
        by.begin(body, caller, held, lambda *_: None, failed.append)
        (refused,) = failed
        assert isinstance(refused, CapacityError)
        assert refused.code == "images_busy"
        assert caller.use.running == 64
        await by.close()
        assert len(failed) == 1


async def test_a_tenant_over_its_limits_has_nothing_fetched() -> None:
    async with host(answer(b"", "404 Not Found")) as images:
        by, body = fetches(images.origin), chat(f"{images.origin}/x")
        caller = tenant(requests_per_min=2)
        # A call whose images cannot be fetched counts as a request.
        for code in ("image_fetch_failed", "image_fetch_failed", "rate_limit_requests"):
            with pytest.raises((RequestError, CapacityError)) as caught:
                await fetched(by, body, caller)
            assert caught.value.code == code
        assert len(images.heads) == 2
        caller = tenant(concurrency=1)
        both = await asyncio.gather(*(fetched(by, body, caller) for _ in range(2)), return_exceptions=True)
        assert [each.code for each in both if isinstance(each, RequestError | CapacityError)] == [
            "image_fetch_failed",
            "concurrency_limit",
        ]
        assert len(images.heads) == 3


async def test_what_a_fetch_was_charged_is_returned_before_the_call_is_admitted() -> None:
    async with host(answer(RED)) as images:
        caller = tenant(requests_per_min=1, tokens_per_min=10, concurrency=1)
        for _ in range(3):
            await fetched(fetches(images.origin), chat(f"{images.origin}/x"), caller)
            assert (caller.use.running, caller.use.requests) == (0, 0)


async def test_images_count_in_those_of_all_requests_while_they_are_fetched() -> None:
    async with host(answer(RED)) as images:
        by, url = fetches(images.origin), f"{images.origin}/x"
        held = HeldMedia(len(RED) * 2)
        for _ in range(2):
            with pytest.raises(CapacityError) as caught:
                await fetched(by, chat(url, url, url), held=held)
            assert caught.value.code == "images_busy"
            _, size = await fetched(by, chat(url, OWN, url), held=held)
            assert size == len(RED) * 2
        held.hold(len(RED) * 2)


@pytest.mark.parametrize(
    ("origins", "reason"),
    [
        (("https://images.example.com/",), "is no origin"),
        (("https://images.example.com/a",), "is no origin"),
        (("https://IMAGES.example.com",), "is no origin"),
        (("https://images.example.com:443",), "is no origin"),
        (("images.example.com",), "is no origin"),
        (("*",), "is no origin"),
        (("http://images.example.com",), "over HTTPS"),
        (("https://10.0.0.1",), "not a public address"),
        (("https://images.internal",), "private network"),
    ],
)
def test_only_public_https_origins_are_listed_unless_the_spec_says_so(
    origins: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        ImagesSpec(url_origins=origins)
