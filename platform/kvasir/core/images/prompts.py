"""Images in prompts: where each one is in the tokens, and what identifies it.

The router computes how many tokens an image becomes, and never decodes its pixels; workers do.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

IMAGE_KEY = "kvasir-image:"
"""Beginning of the key by which an engine tells an image from others."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image at tokens `offset`, …, `offset + length - 1` of a prompt, which all are the model's
    placeholder. `data` is the image file as the client sent it, and `digest` its SHA-256."""

    offset: int
    length: int
    digest: bytes
    data: bytes = field(repr=False)

    def key(self, salt: str) -> str:
        """Return what an engine adds to the hash of blocks that have a part of the image. Under another salt
        it is another key, so that tenants share neither KV nor encoded images."""
        salted = hashlib.sha256(self.digest + salt.encode())
        return IMAGE_KEY + salted.hexdigest()


def image_key(identifier: str) -> str:
    """Return the key in an engine's identifier of an image: it may begin with the name of an adapter."""
    return identifier[max(0, identifier.find(IMAGE_KEY)) :]


def expanded(
    tokens: array[int], placeholder: int, images: Sequence[PromptImage]
) -> tuple[array[int], tuple[PromptImage, ...]]:
    """Return `tokens` with each `placeholder` repeated to the length of its image, and the images with their
    offsets. Raises ValueError unless there are as many placeholders as images."""
    found = tokens.count(placeholder)
    if found != len(images):
        raise ValueError(f"{found} placeholders for {len(images)} images")
    made, placed, at = array("I"), [], 0
    for image in images:
        end = tokens.index(placeholder, at)
        made.extend(tokens[at:end])
        placed.append(replace(image, offset=len(made)))
        made.extend(array("I", [placeholder]) * image.length)
        at = end + 1
    made.extend(tokens[at:])
    return made, tuple(placed)


def collapsed(tokens: array[int], placeholder: int, images: Sequence[PromptImage]) -> array[int]:
    """Return `tokens` with one `placeholder` for each image: the inverse of `expanded`. Raises ValueError for
    an image that is not in order, or whose tokens are not all the placeholder."""
    made, at = array("I"), 0
    for image in images:
        end = image.offset + image.length
        run = tokens[image.offset : end]
        if image.offset < at or not image.length or run.count(placeholder) != image.length:
            raise ValueError(f"tokens {image.offset} to {end} are not those of an image")
        made.extend(tokens[at : image.offset])
        made.append(placeholder)
        at = end
    made.extend(tokens[at:])
    return made
