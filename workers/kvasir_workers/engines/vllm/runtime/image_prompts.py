"""Prompts with images: decodes the images, and has vLLM's processor of the model make its inputs of them.

A router has expanded the placeholders, so that it knows the prompt's length and blocks. Here they are
collapsed for vLLM, which expands them itself, and the two results are compared: a difference refuses the
request instead of answering a wrong prompt.

vLLM gets a key for each image, of its bytes and the request's salt (`PromptImage.key`), which it adds to the
hashes of blocks and by which it caches encoded images.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.multimodal.media import ImageMediaIO
from vllm.v1.engine.async_llm import AsyncLLM

from kvasir.checkpoint.image_tokens import ImageRule
from kvasir.config.spec.edge import ImagesSpec
from kvasir.core.images.headers import image_header
from kvasir.core.images.prompts import PromptImage, collapsed
from kvasir.core.requests import EngineRequest


class ImagePrompts:
    """Makes inputs of `llm` from prompts with images, within `limits`."""

    def __init__(self, llm: AsyncLLM, rule: ImageRule, limits: ImagesSpec) -> None:
        self._llm = llm
        self._rule = rule
        self._limits = limits
        self._io = ImageMediaIO()

    async def prompt(self, request: EngineRequest, threads: Executor) -> Any:
        """Return the input for a request, decoding its images in `threads`. Raise ValueError with the reason
        for images that cannot be decoded or exceed a limit, or whose tokens are others than the router's."""
        images = request.images
        tokens = collapsed(request.tokens, self._rule.placeholder, images)
        decode = asyncio.get_running_loop().run_in_executor(threads, self._decoded, images)
        made = await self._llm.renderer.process_for_engine_async(
            TokensPrompt(
                prompt_token_ids=tokens.tolist(),
                multi_modal_data={"image": await decode},
                multi_modal_uuids={"image": [image.key(request.salt) for image in images]},
                cache_salt=request.salt or None,
            ),
            time.time(),
        )
        if made["prompt_token_ids"] != request.tokens.tolist():
            raise ValueError("the engine makes other tokens of the images than the router")
        return made

    def _decoded(self, images: Sequence[PromptImage]) -> list[Any]:
        if len(images) > self._limits.max_images:
            raise ValueError(f"there are {len(images)} images; {self._limits.max_images} are allowed")
        return [self._one(number, image) for number, image in enumerate(images)]

    def _one(self, number: int, image: PromptImage) -> Any:
        if hashlib.sha256(image.data).digest() != image.digest:
            raise ValueError(f"image {number} is not the one that its digest names")
        header = image_header(image.data)
        if len(image.data) > self._limits.max_bytes or header.pixels > self._limits.max_pixels:
            raise ValueError(f"image {number} exceeds the limits of gateway.image_inputs")
        try:
            # vLLM compares the decoder's own dimensions with VLLM_MAX_IMAGE_PIXELS before it decodes.
            return self._io.load_bytes(image.data)
        except Exception as error:
            raise ValueError(f"image {number} cannot be decoded: {error}") from error
