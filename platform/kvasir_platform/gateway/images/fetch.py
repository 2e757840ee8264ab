"""Fetches images that clients name by URL, from the origins of an allow-list only.

A URL of a client is a way to make this server send requests: to what only it reaches, or to many hosts at
others' cost. So nothing is fetched unless its origin is listed; the connection is vetted as all outbound ones
are, redirects are not followed, and time, bytes and number are bounded. A fetched image goes on as if the
client had sent it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvasir.config.checks.outbound import OutboundRefused, parse_url
from kvasir.config.spec.edge import ImagesSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir_platform.gateway.http.outbound import Resolve, client_context, system_resolve
from kvasir_platform.gateway.http.outbound_client import OutboundClient, OutboundEndpoint, OutboundError
from kvasir_platform.gateway.openai.schema.chat import ChatBody, ContentPart, ImageUrl, Message

_AT_A_TIME = 16
_MOST_WAITING = 64
_DATA = "data:"


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
        urls = [part.image_url.url for part in _image_parts(body.messages) if part.image_url is not None]
        remote = [url for url in urls if not url.startswith(_DATA)]
        return len(remote) > 0 and len(urls) <= self._spec.max_images and all(map(self._allowed, remote))

    def begin(
        self, body: ChatBody, done: Callable[[ChatBody, int], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Fetch the URLs of a chat for which they are wanted. Call `done` with the chat that has the images,
        and their bytes, or `failed` with what it or `done` raises, later on this event loop. Raise
        CapacityError if too many chats wait."""
        if len(self._tasks) >= _MOST_WAITING:
            raise CapacityError("Too many images are being fetched.", code="images_busy")
        task = asyncio.get_running_loop().create_task(self._run(body, done, failed), name="images")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all fetches. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, body: ChatBody, done: Callable[[ChatBody, int], None], failed: Callable[[BaseException], None]
    ) -> None:
        try:
            messages, size = [], 0
            for i, message in enumerate(body.messages):
                fetched, more = await self._message(message, f"messages[{i}]")
                messages.append(fetched)
                size += more
            done(replace(body, messages=messages), size)
        except Exception as error:  # noqa: BLE001 - it is the call's answer
            failed(error)

    async def _message(self, message: Message, where: str) -> tuple[Message, int]:
        if type(message.content) is not list:
            return message, 0
        parts, size = [], 0
        for i, part in enumerate(message.content):
            url = "" if part.image_url is None else part.image_url.url
            if not url or url.startswith(_DATA):
                parts.append(part)
                continue
            data = await self._image(url, f"{where}.content[{i}].image_url.url")
            size += len(data)
            encoded = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
            parts.append(ContentPart(type=part.type, image_url=ImageUrl(url=encoded)))
        return replace(message, content=parts), size

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


def _image_parts(messages: Sequence[Message]) -> list[ContentPart]:
    return [
        part
        for message in messages
        if type(message.content) is list
        for part in message.content
        if part.image_url is not None
    ]
