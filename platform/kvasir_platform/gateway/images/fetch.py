"""Fetches images that clients name by URL, from the origins of an allow-list only.

A URL of a client is a way to make this server send requests: to what only it reaches, or to many hosts at
others' cost. So nothing is fetched unless its origin is listed and the limits of the tenant let the call in;
the connection is vetted as all outbound ones are, redirects are not followed, and time, bytes and number are
bounded. A fetched image goes on as if the client had sent it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvasir.config.checks.outbound import OutboundRefused, parse_url
from kvasir.config.spec.edge import ImagesSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir_platform.gateway.http.outbound import Resolve, client_context, system_resolve
from kvasir_platform.gateway.http.outbound_client import OutboundClient, OutboundEndpoint, OutboundError
from kvasir_platform.gateway.openai.schema.chat import ChatBody, ContentPart, ImageUrl, Message
from kvasir_platform.gateway.openai.schema.image_parts import DATA, HeldImages, image_urls
from kvasir_platform.gateway.tenants.caller import Caller, Charge

_AT_A_TIME = 16
_MOST_WAITING = 64


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `ImageFetches.begin` was called with."""

    body: ChatBody
    held: HeldImages
    done: Callable[[ChatBody, int], None]
    failed: Callable[[BaseException], None]


class ImageFetches:
    """The fetches of a process, within `spec`. Raise OSError if the system's authorities cannot be read."""

    def __init__(
        self, spec: ImagesSpec, *, now: Callable[[], float], resolve: Resolve = system_resolve
    ) -> None:
        self._spec = spec
        self._now = now
        self._resolve = resolve
        self._context = client_context(None)
        self._places = asyncio.Semaphore(_AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()

    def wanted(self, body: ChatBody) -> bool:
        """Whether a chat has URLs to fetch. False too where one is not allowed, or there are too many images,
        for which the chat is refused when it is rendered."""
        urls = [url for _, url in image_urls(body.messages)]
        remote = [url for url in urls if not url.startswith(DATA)]
        return len(remote) > 0 and len(urls) <= self._spec.max_images and all(map(self._allowed, remote))

    def begin(
        self,
        body: ChatBody,
        caller: Caller,
        held: HeldImages,
        done: Callable[[ChatBody, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Fetch the URLs of a chat for which they are wanted, if the limits of `caller` let a call in. Call
        `done` with the chat that has the images, and their bytes, or `failed` with what it or `done` raises,
        at once or later on this event loop.

        Before that, the images count in `held`, and the call in the limits of `caller`, of which it is
        charged one request and one token: what it uses is known with its images only. The charge is returned
        with `done`, and the request is not if the images cannot be fetched."""
        caller.admit(1, _Admission(self._begin, _Asked(body, held, done, failed)), counted=False)

    async def close(self) -> None:
        """End all fetches. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, asked: _Asked, charge: Charge) -> None:
        if len(self._tasks) >= _MOST_WAITING:
            charge.release()
            asked.failed(CapacityError("Too many images are being fetched.", code="images_busy"))
            return
        task = asyncio.get_running_loop().create_task(self._run(asked, charge), name="images")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, asked: _Asked, charge: Charge) -> None:
        try:
            body, size = await self._fetched(asked.body, asked.held)
            charge.release()
            asked.done(body, size)
        except Exception as error:  # noqa: BLE001 - it is the call's answer
            asked.failed(error)
        finally:
            charge.settle(0, 0)

    async def _fetched(self, body: ChatBody, held: HeldImages) -> tuple[ChatBody, int]:
        """Return the chat with its images, and the bytes of those that were fetched."""
        sizes: list[int] = []
        try:
            messages = [
                await self._message(message, f"messages[{i}]", held, sizes)
                for i, message in enumerate(body.messages)
            ]
        finally:
            held.drop(sum(sizes))
        return replace(body, messages=messages), sum(sizes)

    async def _message(self, message: Message, where: str, held: HeldImages, sizes: list[int]) -> Message:
        if type(message.content) is not list:
            return message
        parts = []
        for i, part in enumerate(message.content):
            url = "" if part.image_url is None else part.image_url.url
            if not url or url.startswith(DATA):
                parts.append(part)
                continue
            data = await self._image(url, f"{where}.content[{i}].image_url.url")
            held.hold(len(data))
            sizes.append(len(data))
            encoded = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
            parts.append(ContentPart(type=part.type, image_url=ImageUrl(url=encoded)))
        return replace(message, content=parts)

    async def _image(self, url: str, param: str) -> bytes:
        spec = self._spec
        try:
            async with asyncio.timeout(spec.url_timeout_s), self._places:
                endpoint = OutboundEndpoint(
                    parse_url(url),
                    spec.url_private_address,
                    self._context,
                    accept=b"image/*",
                    max_body_bytes=spec.max_bytes,
                )
                client = OutboundClient(endpoint, connections=1, now=self._now, resolve=self._resolve)
                try:
                    return await client.get()
                finally:
                    await client.close()
        except TimeoutError:
            reason = f"it did not arrive within {spec.url_timeout_s:g} s"
        except (OutboundError, OutboundRefused) as error:
            reason = str(error)
        raise RequestError(f"The image cannot be fetched: {reason}.", code="image_fetch_failed", param=param)

    def _allowed(self, url: str) -> bool:
        try:
            target = parse_url(url)
        except OutboundRefused:
            return False
        return f"{target.scheme}://{target.authority}" in self._spec.url_origins


class _Admission:
    """Begins a fetch once its tenant's limits let the call in. See ChargeReceiver."""

    def __init__(self, begin: Callable[[_Asked, Charge], None], asked: _Asked) -> None:
        self._begin = begin
        self._asked = asked

    def admitted(self, charge: Charge) -> None:
        """Begin the fetch."""
        self._begin(self._asked, charge)

    def failed(self, error: BaseException) -> None:
        """The call is refused, and nothing is fetched."""
        self._asked.failed(error)
