"""Fetches media that clients name by URL, from the origins of an allow-list only.

A URL of a client is a way to make this server send requests: to what only it reaches, or to many hosts at
others' cost. So nothing is fetched unless its origin is listed and the limits of the tenant let the call in;
the connection is vetted as all outbound ones are, redirects are not followed, and time, bytes and number are
bounded. A fetched file goes on as if the client had sent it.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace

from kvasir.config.checks.outbound import OutboundRefused, parse_url
from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.media.inputs import MediaInputsSpec
from kvasir.config.spec.media.served import limits_of
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.media.prompts import MediaKind
from kvasir_platform.gateway.http.outbound import Resolve, client_context, system_resolve
from kvasir_platform.gateway.http.outbound_client import OutboundClient, OutboundEndpoint, OutboundError
from kvasir_platform.gateway.openai.schema.chat import ChatBody, ContentPart, ImageUrl, MediaUrl, Message
from kvasir_platform.gateway.openai.schema.media_parts import (
    DATA,
    HeldMedia,
    MediaPart,
    codes_of,
    media_part,
    media_parts,
)
from kvasir_platform.gateway.tenants.caller import Caller, Charge

_AT_A_TIME = 16
_MOST_WAITING = 64


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `MediaFetches.begin` was called with."""

    body: ChatBody
    held: HeldMedia
    done: Callable[[ChatBody, int], None]
    failed: Callable[[BaseException], None]


def fetched_kinds(spec: GatewaySpec) -> tuple[MediaKind, ...]:
    """Return the kinds of media that have origins to fetch from."""
    return tuple(kind for kind in MediaKind if limits_of(spec, kind).url_origins)


class MediaFetches:
    """The fetches of a process, within `spec`. Raise OSError if the system's authorities cannot be read."""

    def __init__(
        self, spec: GatewaySpec, *, now: Callable[[], float], resolve: Resolve = system_resolve
    ) -> None:
        self._limits = {kind: limits_of(spec, kind) for kind in MediaKind}
        self._now = now
        self._resolve = resolve
        self._context = client_context(None)
        self._places = asyncio.Semaphore(_AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()

    def wanted(self, body: ChatBody, kinds: Collection[MediaKind] = tuple(MediaKind)) -> bool:
        """Whether a chat has URLs to fetch, for a model that takes `kinds`. False too where one is not
        allowed, there are too many files or one is of another kind, for which the chat is refused when it is
        rendered."""
        parts = list(media_parts(body.messages))
        remote = [part for part in parts if not part.url.startswith(DATA)]
        counts = Counter(part.kind for part in parts)
        return (
            len(remote) > 0
            and all(kind in kinds and count <= self._limits[kind].most for kind, count in counts.items())
            and all(map(self._allowed, remote))
        )

    def begin(
        self,
        body: ChatBody,
        caller: Caller,
        held: HeldMedia,
        done: Callable[[ChatBody, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Fetch the URLs of a chat for which they are wanted, if the limits of `caller` let a call in. Call
        `done` with the chat that has the files, and their bytes, or `failed` with what it or `done` raises,
        at once or later on this event loop.

        Before that, the files count in `held`, and the call in the limits of `caller`, of which it is
        charged one request and one token: what it uses is known with its media only. The charge is returned
        with `done`, and the request is not if the files cannot be fetched."""
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
            asked.failed(CapacityError("Too many files are being fetched.", code="images_busy"))
            return
        task = asyncio.get_running_loop().create_task(self._run(asked, charge), name="media")
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

    async def _fetched(self, body: ChatBody, held: HeldMedia) -> tuple[ChatBody, int]:
        """Return the chat with its files, and the bytes of those that were fetched."""
        sizes: list[int] = []
        try:
            messages = [
                await self._message(message, f"messages[{i}]", held, sizes)
                for i, message in enumerate(body.messages)
            ]
        finally:
            held.drop(sum(sizes))
        return replace(body, messages=messages), sum(sizes)

    async def _message(self, message: Message, where: str, held: HeldMedia, sizes: list[int]) -> Message:
        if type(message.content) is not list:
            return message
        parts = []
        for i, part in enumerate(message.content):
            found = media_part(part, f"{where}.content[{i}]")
            if found is None or found.url.startswith(DATA):
                parts.append(part)
                continue
            data = await self._file(found)
            held.hold(len(data))
            sizes.append(len(data))
            encoded = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
            parts.append(_with_file(part.type, found.kind, encoded))
        return replace(message, content=parts)

    async def _file(self, part: MediaPart) -> bytes:
        spec: MediaInputsSpec = self._limits[part.kind]
        try:
            async with asyncio.timeout(spec.url_timeout_s), self._places:
                endpoint = OutboundEndpoint(
                    parse_url(part.url),
                    spec.url_private_address,
                    self._context,
                    accept=f"{part.kind}/*".encode(),
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
        raise RequestError(
            f"The {part.kind} cannot be fetched: {reason}.",
            code=codes_of(part.kind).fetch_failed,
            param=f"{part.where}.{part.field}",
        )

    def _allowed(self, part: MediaPart) -> bool:
        try:
            target = parse_url(part.url)
        except OutboundRefused:
            return False
        return f"{target.scheme}://{target.authority}" in self._limits[part.kind].url_origins


def _with_file(part_type: str, kind: MediaKind, url: str) -> ContentPart:
    match kind:
        case MediaKind.IMAGE:
            return ContentPart(type=part_type, image_url=ImageUrl(url=url))
        case MediaKind.VIDEO:
            return ContentPart(type=part_type, video_url=MediaUrl(url=url))
        case MediaKind.AUDIO:
            return ContentPart(type=part_type, audio_url=MediaUrl(url=url))


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
