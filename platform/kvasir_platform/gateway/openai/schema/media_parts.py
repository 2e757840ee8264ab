"""Images, videos and audio that clients send: from the parts of a chat to what a request to the router
carries.

Only headers are read here, for dimensions and lengths; workers decode. All of this runs with the rendering of
the chat, for large bodies in a thread.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvasir.config.spec.media.served import MediaInputs, MediaTooLarge
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.media.prompts import MediaKind, PromptMedia, expanded
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.openai.schema.chat import ContentPart, Message
from kvasir_platform.gateway.openai.schema.limits import bad

_LIMITS: Mapping[MediaKind, str] = {
    MediaKind.IMAGE: "gateway.image_inputs.max_images",
    MediaKind.VIDEO: "gateway.video_inputs.max_videos",
    MediaKind.AUDIO: "gateway.audio_inputs.max_clips",
}
DATA = "data:"
"""How the URL of a file begins that has the file itself."""
_DATA_URL = re.compile(r"data:[\w.+/-]{0,127}(?:;[\w.+=-]{1,127}){0,4};base64,", re.ASCII)
_HEAD = 1024
_EXAMPLES = {
    MediaKind.IMAGE: "data:image/png;base64,…",
    MediaKind.VIDEO: "data:video/mp4;base64,…",
    MediaKind.AUDIO: "data:audio/wav;base64,…",
}


class MediaCodes(NamedTuple):
    """The codes of what is wrong with media of a kind."""

    invalid: str
    too_large: str
    too_many: str
    url_refused: str
    fetch_failed: str


_IMAGE_CODES = MediaCodes(
    "invalid_image", "image_too_large", "too_many_images", "image_url_refused", "image_fetch_failed"
)
_MEDIA_CODES = MediaCodes(
    "invalid_media", "media_too_large", "too_many_media", "media_url_refused", "media_fetch_failed"
)


class MediaPart(NamedTuple):
    """An item of a chat: the part that has it, the field with its URL, its kind, and the URL."""

    where: str
    field: str
    kind: MediaKind
    url: str


def codes_of(kind: MediaKind) -> MediaCodes:
    """Return the codes of what is wrong with media of `kind`."""
    return _IMAGE_CODES if kind is MediaKind.IMAGE else _MEDIA_CODES


def chat_media(
    messages: Sequence[Message], capabilities: ModelCapabilities, model: str
) -> tuple[PromptMedia, ...]:
    """Return the media of a chat in order, without their offsets. Raise RequestError with the part at fault,
    for a model that does not take their kind, and for files that exceed a limit or are of another format."""
    if list not in {type(message.content) for message in messages}:
        return ()
    parts = list(media_parts(messages))
    if not parts:
        return ()
    inputs = capabilities.media
    taken = () if inputs is None else inputs.kinds
    for part in parts:
        if part.kind not in taken:
            off = "" if inputs is None else _switched_off(part.kind, inputs)
            raise RequestError(
                f"The model {model!r} takes {_listed(taken)} only here, and no {part.kind.plural}{off}.",
                code="unsupported_modality",
                param=f"{part.where}.type",
            )
    if inputs is None:
        return ()
    _check_numbers(parts, inputs)
    return tuple(_item(part, inputs) for part in parts)


def _switched_off(kind: MediaKind, inputs: MediaInputs) -> str:
    """Return why a kind is refused that the model could take, "" if it could not."""
    if kind not in inputs.rules.placeholders:
        return ""
    return f": {_LIMITS[kind]} is 0"


def with_media(
    tokens: array[int], media: Sequence[PromptMedia], inputs: MediaInputs
) -> tuple[array[int], tuple[PromptMedia, ...]]:
    """Return the tokens of a chat with those of its media, and these with their offsets. Raise RequestError
    if the rendered chat has not one placeholder for each item."""
    try:
        return expanded(tokens, inputs.rules.placeholders, media)
    except ValueError as error:
        raise bad(f"The chat template does not place media as they were sent: {error}.", "messages") from None


class HeldMedia:
    """The bytes of the media of all requests in flight, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0

    def hold(self, size: int) -> None:
        """Count the bytes of a request until `drop`. Raise CapacityError if there are too many."""
        if self._bytes + size > self._limit:
            raise CapacityError(
                "Images, videos and audio of other requests take all memory for them.", code="images_busy"
            )
        self._bytes += size

    def drop(self, size: int) -> None:
        """The request has ended."""
        self._bytes -= size


def media_parts(messages: Sequence[Message]) -> Iterator[MediaPart]:
    """Yield each image, video and audio file of a chat, in order."""
    for i, message in enumerate(messages):
        if type(message.content) is list:
            for j, part in enumerate(message.content):
                if (found := media_part(part, f"messages[{i}].content[{j}]")) is not None:
                    yield found


def media_part(part: ContentPart, where: str) -> MediaPart | None:
    """Return the item that a part has, None for text."""
    if part.image_url is not None:
        return MediaPart(where, "image_url.url", MediaKind.IMAGE, part.image_url.url)
    if part.video_url is not None:
        return MediaPart(where, "video_url.url", MediaKind.VIDEO, part.video_url.url)
    if part.audio_url is not None:
        return MediaPart(where, "audio_url.url", MediaKind.AUDIO, part.audio_url.url)
    if (sent := part.input_audio) is not None:
        url = f"data:audio/{sent.format};base64,{sent.data}"
        return MediaPart(where, "input_audio.data", MediaKind.AUDIO, url)
    return None


def _listed(kinds: Sequence[MediaKind]) -> str:
    *others, last = ("text", *(kind.plural for kind in kinds))
    return f"{', '.join(others)} and {last}" if others else last


def _check_numbers(parts: Sequence[MediaPart], inputs: MediaInputs) -> None:
    seen: Counter[MediaKind] = Counter()
    counts = Counter(part.kind for part in parts)
    for part in parts:
        seen[part.kind] += 1
        if seen[part.kind] > (most := inputs.limits(part.kind).most):
            items = "audio files" if part.kind is MediaKind.AUDIO else part.kind.plural
            raise RequestError(
                f"The request has {counts[part.kind]} {items}; {most} are allowed.",
                code=codes_of(part.kind).too_many,
                param=f"{part.where}.type",
            )


def _item(part: MediaPart, inputs: MediaInputs) -> PromptMedia:
    kind, codes, param = part.kind, codes_of(part.kind), f"{part.where}.{part.field}"
    data = _file(part, inputs.limits(kind).max_bytes)
    try:
        length, extent = inputs.measured(kind, data)
    except MediaTooLarge as error:
        raise RequestError(f"The {kind} is too large: {error}.", code=codes.too_large, param=param) from None
    except ValueError as error:
        raise RequestError(f"The {kind} is not served: {error}.", code=codes.invalid, param=param) from None
    return PromptMedia(0, length, hashlib.sha256(data).digest(), data, kind, extent)


def _file(part: MediaPart, most: int) -> bytes:
    """Return the file in a data URL, of which a little more than `most` bytes are decoded."""
    url, codes, param = part.url, codes_of(part.kind), f"{part.where}.{part.field}"
    if not url.startswith(DATA):
        raise RequestError(
            f"The {part.kind} is not a data URL, as in {_EXAMPLES[part.kind]}, and this server does not "
            "fetch it.",
            code=codes.url_refused,
            param=param,
        )
    head = _DATA_URL.match(url[:_HEAD])
    if head is None:
        message = f"The data URL is not of the form {_EXAMPLES[part.kind]}."
        raise RequestError(message, code=codes.invalid, param=param)
    encoded = url[head.end() :]
    if len(encoded) // 4 * 3 > most + 2:
        message = f"The {part.kind} is too large: it has more than the {most} bytes that are allowed."
        raise RequestError(message, code=codes.too_large, param=param)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("The data URL is not valid base64.", code=codes.invalid, param=param) from None
