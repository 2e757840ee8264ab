"""Images on real vLLM engines: the tokens of plain vLLM, KV that no other image shares, records that name
blocks as routers do, and a hand-off from one engine to another."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, start_bench
from tests.kit.engines.kv_follower import KvFollower
from tests.kit.engines.recorder import Recorded
from tests.kit.engines.vllm_reference import reference
from tests.kit.media.image_files import bomb, png
from tests.kit.models.vision import IMAGE_TOKENS, make_vision_model
from tests.kit.shared.specs import apart

from kvasir.checkpoint.media.images import ImageRule, image_rule
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec
from kvasir.core.media.prompts import MediaKind, PromptMedia, expanded
from kvasir.core.requests import Continuation, EngineRequest, KvHandoff, Leg, Sampling, Usage, token_ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 32
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
RED, BLUE = png(70, 50, (250, 20, 20)), png(70, 50, (20, 20, 250))
ENGINE = EngineSpec(kind="vllm", block_size=BLOCK, kv_cache_bytes=32 << 20, threads=1)
RNG = random.Random(27)
BEFORE, AFTER = ([100 + RNG.randrange(3000) for _ in range(length)] for length in (40, 90))


def deployment(folder: Path) -> Deployment:
    model = ModelSpec(source=str(folder), dtype="float32", max_model_len=1024)
    return apart(ENGINE).model_copy(update={"model": model})


@dataclass
class Viewers:
    """Two engines of a model that takes images, and what plain vLLM says of prompts."""

    prefill: EngineBench
    decode: EngineBench
    rule: ImageRule
    alone: dict[tuple[bytes, ...], list[int]]

    def request(self, bench: EngineBench, *files: bytes, **changes: Any) -> EngineRequest:
        """A prompt with these images between two texts."""
        images = [PromptMedia(0, IMAGE_TOKENS, hashlib.sha256(data).digest(), data) for data in files]
        places = {MediaKind.IMAGE: self.rule.placeholder}
        tokens, placed = expanded(plain(self.rule, len(files)), places, images)
        return replace(bench.request(tokens, GREEDY), media=placed, **changes)

    async def see(self, *files: bytes, **changes: Any) -> Recorded:
        """Run such a prompt on the prefill engine."""
        (done,) = await self.prefill.run(self.request(self.prefill, *files, **changes))
        return done


def plain(rule: ImageRule, images: int) -> array[int]:
    return token_ids([*BEFORE, *[rule.placeholder] * images, *AFTER])


def usage(done: Recorded) -> Usage:
    assert done.last is not None, "it has not ended"
    assert done.last.error is None, done.last.error_message
    assert done.last.usage is not None
    return done.last.usage


def refusal(done: Recorded) -> tuple[str | None, str]:
    assert done.last is not None
    return done.last.error, done.last.error_message or ""


def pictures(files: Sequence[bytes]) -> list[Any]:
    from PIL import Image

    return [Image.open(io.BytesIO(data)).convert("RGB") for data in files]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def viewers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Viewers]:
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm.engine import VllmEngine

    folder = make_vision_model(tmp_path_factory.mktemp("vision") / "llava")
    rule = image_rule(folder)
    assert rule is not None
    with reference(folder, None, max_model_len=1024) as vllm:
        alone: dict[tuple[bytes, ...], list[int]] = {
            files: list(
                vllm.generate(
                    plain(rule, len(files)).tolist(),
                    media={"image": pictures(files)},
                    max_tokens=16,
                    temperature=0.0,
                    ignore_eos=True,
                )
                .outputs[0]
                .token_ids
            )
            for files in ((RED,), (BLUE,), (RED, BLUE), (BLUE, RED))
        }
    spec = deployment(folder)
    prefill, decode = [
        await start_bench(VllmEngine(spec, pool, model_path=str(folder)), f"{pool.name}-0")
        for pool in spec.pools
    ]
    yield Viewers(prefill, decode, rule, alone)
    await asyncio.gather(prefill.engine.stop(), decode.engine.stop())


async def test_answers_are_those_of_plain_vllm(viewers: Viewers) -> None:
    assert viewers.prefill.identity.images
    assert len({tuple(tokens) for tokens in viewers.alone.values()}) == 4, "the model does not look at images"
    for files, tokens in viewers.alone.items():
        done = await viewers.see(*files)
        assert usage(done).prompt_tokens == len(BEFORE) + len(AFTER) + len(files) * IMAGE_TOKENS
        assert done.choice().tokens == tokens


async def test_kv_is_shared_up_to_the_first_image_that_differs_and_named_as_routers_name_it(
    viewers: Viewers,
) -> None:
    source = viewers.prefill.engine.kv
    assert source is not None
    follower = KvFollower(viewers.prefill.identity, source)
    await follower.catch_up()
    length = len(BEFORE) + len(AFTER) + IMAGE_TOKENS

    async def cached(*files: bytes, salt: str) -> int:
        request = viewers.request(viewers.prefill, *files, salt=salt)
        expected = follower.hit(request.tokens, salt=salt, media=request.media)
        (done,) = await viewers.prefill.run(request)
        assert usage(done).cached_tokens == expected
        whole = len(request.tokens) // BLOCK
        await follower.until(lambda: follower.blocks(request.tokens, 0, salt, media=request.media) == whole)
        return expected

    assert await cached(RED, salt="shared") == 0
    assert await cached(RED, salt="shared") == (length - 1) // BLOCK * BLOCK
    assert await cached(BLUE, salt="shared") == len(BEFORE) // BLOCK * BLOCK
    assert await cached(RED, salt="other") == 0
    source.subscribe(None)


async def test_a_hand_off_of_a_prompt_with_images_has_the_tokens_of_one_engine(viewers: Viewers) -> None:
    for files in ((RED,), (BLUE, RED)):
        salt = f"apart-{len(files)}"
        first = await viewers.see(*files, leg=Leg.PREFILL, salt=salt)
        assert first.last is not None
        handoff: KvHandoff | None = first.last.handoff
        assert handoff is not None, refusal(first)
        (done,) = await viewers.decode.run(
            viewers.request(viewers.decode, *files, leg=Leg.DECODE, handoff=handoff, salt=salt)
        )
        assert done.choice().tokens == viewers.alone[files]
        assert usage(done).transferred_tokens == usage(done).prompt_tokens - 1
        # The same picture is found where it was pulled to.
        (again,) = await viewers.decode.run(viewers.request(viewers.decode, *files, salt=salt))
        assert usage(again).cached_tokens >= (usage(again).prompt_tokens - 1) // BLOCK * BLOCK


async def test_a_lost_stream_with_an_image_goes_on_at_another_engine(viewers: Viewers) -> None:
    whole = viewers.alone[(RED,)]
    request = viewers.request(viewers.decode, RED, salt="moved")
    tokens = request.tokens + token_ids(whole[:6])
    (done,) = await viewers.decode.run(replace(request, tokens=tokens, continuation=Continuation(6, 0)))
    usage(done)
    assert done.choice().tokens == whole[6:]


async def test_what_a_router_would_not_send_is_refused_with_a_reason(viewers: Viewers) -> None:
    request = viewers.request(viewers.prefill, RED)
    (image,) = request.media

    async def said(**changes: Any) -> str:
        changed = replace(request, request_id=viewers.prefill.new_id(), **changes)
        (done,) = await viewers.prefill.run(changed)
        code, message = refusal(done)
        assert code == "invalid_value"
        return message

    def other(data: bytes) -> tuple[PromptMedia, ...]:
        return (replace(image, data=data, digest=hashlib.sha256(data).digest()),)

    assert "16777216 are allowed" in await said(media=other(bomb(60_000, 60_000)))
    assert "cannot be decoded" in await said(media=other(bomb(60, 60)))
    assert "none of PNG" in await said(media=other(b"MZ"))
    assert "digest" in await said(media=(replace(image, digest=bytes(32)),))
    assert "not those of an image" in await said(media=(replace(image, offset=3),))
    longer = request.tokens[:]
    longer.insert(image.offset, viewers.rule.placeholder)
    message = await said(tokens=longer, media=(replace(image, length=image.length + 1),))
    assert "16 tokens here and 17 in the router" in message
    assert usage(await viewers.see(RED)).output_tokens == 16
