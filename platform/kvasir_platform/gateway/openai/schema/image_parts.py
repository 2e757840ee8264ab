"""Images that clients send: from the parts of a chat to what a request to the router carries.

Only headers are read here, for the dimensions; workers decode. All of this runs with the rendering of the
chat, for large bodies in a thread.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from array import array
from collections.abc import Iterator, Sequence

from kvasir.config.spec.edge import ImagesSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.images.headers import image_header
from kvasir.core.images.prompts import PromptImage, expanded
from kvasir_platform.gateway.catalog.capabilities import ImageInputs, ModelCapabilities
from kvasir_platform.gateway.openai.schema.chat import Message
from kvasir_platform.gateway.openai.schema.limits import bad

DATA = "data:"
"""How the URL of an image begins that has the image itself."""
_DATA_URL = re.compile(r"data:[\w.+/-]{0,127}(?:;[\w.+=-]{1,127}){0,4};base64,", re.ASCII)
_HEAD = 1024


def chat_images(
    messages: Sequence[Message], capabilities: ModelCapabilities, model: str
) -> tuple[PromptImage, ...]:
    """Return the images of a chat in order, without their offsets. Raise RequestError with the part at fault,
    for a model that takes none, and for images that exceed a limit or are none."""
    if list not in {type(message.content) for message in messages}:
        return ()
    parts = list(image_urls(messages))
    if not parts:
        return ()
    inputs = capabilities.images
    if inputs is None or not inputs.limits.max_images:
        raise RequestError(
            f"The model {model!r} takes text only here, and no images.",
            code="unsupported_modality",
            param=f"{parts[0][0]}.type",
        )
    if len(parts) > inputs.limits.max_images:
        raise RequestError(
            f"The request has {len(parts)} images; {inputs.limits.max_images} are allowed.",
            code="too_many_images",
            param=f"{parts[inputs.limits.max_images][0]}.type",
        )
    return tuple(_image(url, f"{where}.image_url.url", inputs) for where, url in parts)


def with_images(
    tokens: array[int], images: Sequence[PromptImage], inputs: ImageInputs
) -> tuple[array[int], tuple[PromptImage, ...]]:
    """Return the tokens of a chat with those of its images, and the images with their offsets. Raise
    RequestError if the rendered chat has not one placeholder for each image."""
    try:
        return expanded(tokens, inputs.rule.placeholder, images)
    except ValueError as error:
        raise bad(
            f"The chat template does not place the images as they were sent: {error}.", "messages"
        ) from None


class HeldImages:
    """The bytes of the images of all requests in flight, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0

    def hold(self, size: int) -> None:
        """Count the bytes of a request until `drop`. Raise CapacityError if there are too many."""
        if self._bytes + size > self._limit:
            raise CapacityError("Images of other requests take all memory for images.", code="images_busy")
        self._bytes += size

    def drop(self, size: int) -> None:
        """The request has ended."""
        self._bytes -= size


def image_urls(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the part and the URL of each image of a chat, in order."""
    for i, message in enumerate(messages):
        if type(message.content) is list:
            for j, part in enumerate(message.content):
                if part.image_url is not None:
                    yield f"messages[{i}].content[{j}]", part.image_url.url


def _image(url: str, param: str, inputs: ImageInputs) -> PromptImage:
    data = _file(url, param, inputs.limits)
    try:
        header = image_header(data)
    except ValueError as error:
        raise _invalid(f"The image is not served: {error}.", param) from None
    if header.pixels > inputs.limits.max_pixels:
        raise RequestError(
            f"The image has {header.width} x {header.height} pixels; {inputs.limits.max_pixels} are allowed.",
            code="image_too_large",
            param=param,
        )
    try:
        length = inputs.rule.tokens(header.width, header.height)
    except ValueError as error:
        raise _invalid(f"The model does not take this image: {error}.", param) from None
    return PromptImage(offset=0, length=length, digest=hashlib.sha256(data).digest(), data=data)


def _file(url: str, param: str, limits: ImagesSpec) -> bytes:
    """Return the file in a data URL."""
    if not url.startswith(DATA):
        raise RequestError(
            "The image is not a data URL, as in data:image/png;base64,…, and this server does not fetch it.",
            code="image_url_refused",
            param=param,
        )
    head = _DATA_URL.match(url[:_HEAD])
    if head is None:
        raise _invalid("The data URL is not of the form data:image/png;base64,….", param)
    encoded = url[head.end() :]
    if len(encoded) // 4 * 3 > limits.max_bytes + 2:
        raise _too_large(limits, param)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid("The data URL is not valid base64.", param) from None
    if len(data) > limits.max_bytes:
        raise _too_large(limits, param)
    return data


def _too_large(limits: ImagesSpec, param: str) -> RequestError:
    return RequestError(
        f"The image has more than the {limits.max_bytes} bytes that are allowed.",
        code="image_too_large",
        param=param,
    )


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, code="invalid_image", param=param)
