"""Prompts with media: decodes the files, and has vLLM's processor of the model make its inputs of them.

A router has expanded the placeholders, so that it knows the prompt's length and blocks. Here they are
collapsed for vLLM, which expands them itself, and the two results are compared: a difference refuses the
request instead of answering a wrong prompt.

vLLM gets a key for each item, of its bytes and the request's salt (`PromptMedia.key`), which it adds to the
hashes of blocks and by which it caches encoded media.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from kvasir.config.spec.media.served import MediaInputs
from kvasir.core.media.audio import audio_header
from kvasir.core.media.prompts import MediaKind, PromptMedia, collapsed
from kvasir.core.media.videos import video_header
from kvasir.core.requests import EngineRequest
from kvasir_workers.engines.vllm.runtime import media_files


class MediaPrompts:
    """Makes inputs of `llm` from prompts with the media of `inputs`."""

    def __init__(self, llm: AsyncLLM, inputs: MediaInputs) -> None:
        self._llm = llm
        self._inputs = inputs

    async def prompt(self, request: EngineRequest, threads: Executor) -> Any:
        """Return the input for a request, decoding its media in `threads`. Raise ValueError with the reason
        for files that cannot be decoded or exceed a limit, or whose tokens are others than the router's."""
        media = request.media
        tokens = collapsed(request.tokens, self._inputs.rules.placeholders, media)
        decode = asyncio.get_running_loop().run_in_executor(threads, self._decoded, media)
        keys: dict[str, list[str]] = defaultdict(list)
        for item in media:
            keys[item.kind.value].append(item.key(request.salt))
        made = await self._llm.renderer.process_for_engine_async(
            TokensPrompt(
                prompt_token_ids=tokens.tolist(),
                multi_modal_data=await decode,
                multi_modal_uuids=keys,
                cache_salt=request.salt or None,
            ),
            time.time(),
        )
        if made["prompt_token_ids"] != request.tokens.tolist():
            raise ValueError("the engine makes other tokens of the media than the router")
        return made

    def _decoded(self, media: Sequence[PromptMedia]) -> dict[str, list[Any]]:
        for kind, count in Counter(item.kind for item in media).items():
            if count > (most := self._inputs.limits(kind).most):
                raise ValueError(f"there are {count} items of {kind}; {most} are allowed")
        decoded: dict[str, list[Any]] = defaultdict(list)
        for number, item in enumerate(media):
            decoded[item.kind.value].append(self._one(f"{item.kind} {number}", item))
        return decoded

    def _one(self, name: str, item: PromptMedia) -> Any:
        if hashlib.sha256(item.data).digest() != item.digest:
            raise ValueError(f"{name} is not the one that its digest names")
        try:
            measured = self._inputs.measured(item.kind, item.data)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if measured != (item.length, item.extent):
            raise ValueError(
                f"{name} has {measured[0]} tokens here and {item.length} in the router, whose limits differ"
            )
        try:
            return self._file(item)
        except Exception as error:
            raise ValueError(f"{name} cannot be decoded: {error}") from error

    def _file(self, item: PromptMedia) -> Any:
        rule = self._inputs.rules.audio
        match item.kind:
            case MediaKind.IMAGE:
                return media_files.image(item.data)
            case MediaKind.VIDEO:
                return media_files.video(item.data, video_header(item.data), item.extent)
            case MediaKind.AUDIO:
                if rule is None:
                    raise ValueError("the model takes no audio")
                return media_files.audio(item.data, audio_header(item.data), item.extent, rule.rate)
