"""Audio on real vLLM engines: the tokens of plain vLLM, KV that no other file shares, records that
name blocks as routers do, and a hand-off from one engine to another."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, start_bench
from tests.kit.engines.kv_follower import KvFollower
from tests.kit.engines.recorder import Recorded
from tests.kit.engines.vllm_reference import reference
from tests.kit.media.media_files import wav
from tests.kit.models.hearing import RATE, make_hearing_model
from tests.kit.shared.specs import apart

from kvasir.checkpoint.media.rules import media_rules
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec
from kvasir.config.spec.media.served import MediaInputs
from kvasir.core.media.audio import audio_header
from kvasir.core.media.prompts import MediaKind, PromptMedia, expanded
from kvasir.core.requests import Continuation, EngineRequest, Leg, Sampling, Usage, token_ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 32
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
ENGINE = EngineSpec(kind="vllm", block_size=BLOCK, kv_cache_bytes=32 << 20, threads=1)
RNG = random.Random(28)
BEFORE, AFTER = ([100 + RNG.randrange(3000) for _ in range(length)] for length in (40, 90))


def heard(data: bytes) -> Any:
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate


def deployment(folder: Path) -> Deployment:
    model = ModelSpec(source=str(folder), dtype="float32", max_model_len=1024)
    return apart(ENGINE).model_copy(update={"model": model})


@dataclass
class Audience:
    """Two engines of a model that takes such files, and what plain vLLM says of prompts."""

    kind: MediaKind
    prefill: EngineBench
    decode: EngineBench
    inputs: MediaInputs
    files: tuple[bytes, bytes]
    alone: dict[bytes, list[int]]

    def request(self, bench: EngineBench, data: bytes, **changes: Any) -> EngineRequest:
        """A prompt with this file between two texts, as a router would send it."""
        length, extent = self.inputs.measured(self.kind, data)
        item = PromptMedia(0, length, hashlib.sha256(data).digest(), data, self.kind, extent)
        places = self.inputs.rules.placeholders
        tokens, placed = expanded(plain(places[self.kind]), places, [item])
        return replace(bench.request(tokens, GREEDY), media=placed, **changes)

    @property
    def stranger(self) -> MediaKind:
        """A kind that the model does not take."""
        return next(kind for kind in MediaKind if kind not in self.inputs.kinds)

    async def ask(self, data: bytes, **changes: Any) -> Recorded:
        """Run such a prompt on the prefill engine."""
        (done,) = await self.prefill.run(self.request(self.prefill, data, **changes))
        return done


def plain(placeholder: int) -> array[int]:
    return token_ids([*BEFORE, placeholder, *AFTER])


def usage(done: Recorded) -> Usage:
    assert done.last is not None, "it has not ended"
    assert done.last.error is None, done.last.error_message
    assert done.last.usage is not None
    return done.last.usage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def audience(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Audience]:
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm.engine import VllmEngine

    folder = make_hearing_model(tmp_path_factory.mktemp("hearing") / "qwen2-audio")
    spec = deployment(folder)
    inputs, files = MediaInputs(media_rules(folder), spec.gateway), (wav(1.5, 300), wav(1.5, 1100))
    prompt = plain(inputs.rules.placeholders[MediaKind.AUDIO]).tolist()
    with reference(folder, None, max_model_len=1024) as vllm:
        alone: dict[bytes, list[int]] = {
            data: list(
                vllm.generate(
                    prompt,
                    media={"audio": [heard(data)]},
                    max_tokens=16,
                    temperature=0.0,
                    ignore_eos=True,
                )
                .outputs[0]
                .token_ids
            )
            for data in files
        }
    prefill, decode = [
        await start_bench(VllmEngine(spec, pool, model_path=str(folder)), f"{pool.name}-0")
        for pool in spec.pools
    ]
    yield Audience(MediaKind.AUDIO, prefill, decode, inputs, files, alone)
    await asyncio.gather(prefill.engine.stop(), decode.engine.stop())


async def test_answers_are_those_of_plain_vllm(audience: Audience) -> None:
    assert audience.kind in audience.prefill.identity.media_kinds
    one, other = audience.files
    assert audience.alone[one] != audience.alone[other], "the model does not look at the file"
    for data in audience.files:
        done = await audience.ask(data)
        length, _ = audience.inputs.measured(audience.kind, data)
        assert usage(done).prompt_tokens == len(BEFORE) + len(AFTER) + length
        assert done.choice().tokens == audience.alone[data]


async def test_kv_is_shared_up_to_the_first_file_that_differs_and_named_as_routers_name_it(
    audience: Audience,
) -> None:
    one, other = audience.files
    source = audience.prefill.engine.kv
    assert source is not None
    follower = KvFollower(audience.prefill.identity, source)
    await follower.catch_up()

    async def cached(data: bytes, salt: str) -> int:
        request = audience.request(audience.prefill, data, salt=salt)
        expected = follower.hit(request.tokens, salt=salt, media=request.media)
        (done,) = await audience.prefill.run(request)
        assert usage(done).cached_tokens == expected
        whole = len(request.tokens) // BLOCK
        await follower.until(lambda: follower.blocks(request.tokens, 0, salt, media=request.media) == whole)
        return expected

    length = len(BEFORE) + len(AFTER) + audience.inputs.measured(audience.kind, one)[0]
    assert await cached(one, "shared") == 0
    assert await cached(one, "shared") == (length - 1) // BLOCK * BLOCK
    assert await cached(other, "shared") == len(BEFORE) // BLOCK * BLOCK
    assert await cached(one, "other") == 0
    source.subscribe(None)


async def test_a_hand_off_and_a_continuation_have_the_tokens_of_one_engine(audience: Audience) -> None:
    one, _ = audience.files
    whole = audience.alone[one]
    first = await audience.ask(one, leg=Leg.PREFILL, salt="apart")
    assert first.last is not None
    assert first.last.handoff is not None, first.last.error_message
    (done,) = await audience.decode.run(
        audience.request(audience.decode, one, leg=Leg.DECODE, handoff=first.last.handoff, salt="apart")
    )
    assert done.choice().tokens == whole
    assert usage(done).transferred_tokens == usage(done).prompt_tokens - 1
    request = audience.request(audience.decode, one, salt="moved")
    tokens = request.tokens + token_ids(whole[:6])
    (done,) = await audience.decode.run(replace(request, tokens=tokens, continuation=Continuation(6, 0)))
    usage(done)
    assert done.choice().tokens == whole[6:]


async def test_what_a_router_would_not_send_is_refused_with_a_reason(audience: Audience) -> None:
    one, _ = audience.files
    request = audience.request(audience.prefill, one)
    (item,) = request.media

    async def said(**changes: Any) -> str:
        media = (replace(item, **changes),)
        (done,) = await audience.prefill.run(
            replace(request, request_id=audience.prefill.new_id(), media=media)
        )
        assert done.last is not None
        assert done.last.error == "invalid_value"
        return done.last.error_message or ""

    def other(data: bytes) -> dict[str, Any]:
        return {"data": data, "digest": hashlib.sha256(data).digest()}

    assert "is not the one that its digest names" in await said(digest=bytes(32))
    assert "it is no" in await said(**other(b"MZ"))
    assert "whose limits differ" in await said(extent=item.extent - 1)
    assert "the model takes no" in await said(kind=audience.stranger)
    assert await said(**other(one[: len(one) * 3 // 4]))
    assert usage(await audience.ask(one)).output_tokens == 16


async def test_audio_of_other_rates_channels_and_formats_is_heard(audience: Audience) -> None:
    import soundfile

    samples, rate = heard(wav(1.5, 300, rate=44_100, channels=2))
    for form in ("WAV", "FLAC", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, samples, rate, format=form)
        data = file.getvalue()
        assert audio_header(data).format == form
        done = await audience.ask(data)
        usage(done)
        assert audience.inputs.measured(audience.kind, data)[1] >= 1.5 * RATE
        assert len(done.choice().tokens) == 16
