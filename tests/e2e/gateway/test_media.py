"""Audio and videos in chats: over gateway, router and simulated engines, whose KV depends on them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.kit.media.image_files import data_url, png
from tests.kit.media.media_files import mp4, wav
from tests.kit.media.viewers import APART, BLOCK, WHOLE, Viewer, open_viewer
from tests.kit.models.media_tokenizer import make_media_tokenizer

from kvasir.checkpoint.media.audio import HalvedFrames
from kvasir.checkpoint.media.images import FixedTokens, GridTokens
from kvasir.checkpoint.media.rules import MediaRules
from kvasir.checkpoint.media.videos import GridFrames
from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir.config.spec.media.inputs import AudioSpec, VideosSpec
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer

TEXT = "What do you see and hear in this, and in which order? Answer in one short sentence, please. " * 2
LOW, HIGH = wav(1.0, 300), wav(1.0, 900)
LAKE, WOOD = mp4(112, 84, 50, name=b"lake"), mp4(112, 84, 50, name=b"wood")
SECOND = (100 - 1) // 2 + 1
AUDIO_TOKENS = (SECOND - 2) // 2 + 1
VIDEO_TOKENS = 8 // 2 * 4 * 3
AUDIO = AudioSpec(max_clips=2, max_bytes=48 << 10, max_seconds=2.0)
VIDEO = VideosSpec(max_videos=2, max_bytes=8192, max_pixels=20_000, max_seconds=10.0, frames=8)

Opened = Callable[..., Any]


def sound(data: bytes, form: str = "wav") -> Any:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def audio(url: str) -> Any:
    return {"type": "audio_url", "audio_url": {"url": url}}


def film(data: bytes) -> Any:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def said(*parts: Any, text: str = TEXT) -> list[Any]:
    """Messages with media before their text."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def media_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, list[int]]:
    folder = tmp_path_factory.mktemp("media")
    ids = make_media_tokenizer(folder, {"image": "<image>", "video": "<video>", "audio": "<audio>"})
    return ModelTokenizer.from_folder(folder, Deployment().tokenizer), list(ids.values())


@pytest.fixture
def opened(media_tokenizer: tuple[ModelTokenizer, list[int]]) -> Opened:
    tokenizer, (image, video, heard) = media_tokenizer

    @asynccontextmanager
    async def viewer(
        *, takes: str = "image video audio", pools: Any = WHOLE, audio: AudioSpec = AUDIO
    ) -> AsyncIterator[Viewer]:
        rules = MediaRules(
            FixedTokens(image, 16) if "image" in takes else None,
            GridFrames(GridTokens(video, 28, 3136, 784_000), 2) if "video" in takes else None,
            HalvedFrames(heard, 16_000, 160, 480_000) if "audio" in takes else None,
        )
        async with open_viewer(
            tokenizer, rules, GatewaySpec(video_inputs=VIDEO, audio_inputs=audio), pools
        ) as made:
            yield made

    return viewer


@pytest.mark.parametrize("pools", [WHOLE, APART], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize(
    ("one", "other", "length"),
    [(sound(LOW), sound(HIGH), AUDIO_TOKENS), (film(LAKE), film(WOOD), VIDEO_TOKENS)],
    ids=["audio", "video"],
)
async def test_equal_texts_share_blocks_only_as_far_as_their_media_are_equal(
    opened: Opened, one: Any, other: Any, length: int, pools: Any
) -> None:
    async with opened(pools=pools) as viewer:
        first, tokens, cached = await viewer.ask(said(one))
        assert cached == 0
        _, plain, _ = await viewer.ask(said())
        assert tokens == plain + length
        assert (await viewer.ask(said(one)))[2] == (tokens - 1) // BLOCK > 2
        second, same, cached = await viewer.ask(said(other))
        assert (same, cached) == (tokens, 0)
        assert first != second


async def test_a_prompt_may_have_all_kinds_in_any_order(opened: Opened) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(png(8, 8))}}
    async with opened() as viewer:
        _, plain, _ = await viewer.ask(said())
        for parts in ([picture, film(LAKE), sound(LOW)], [sound(LOW), sound(HIGH), film(LAKE), picture]):
            _, tokens, _ = await viewer.ask(said(*parts))
            sounds = sum(part["type"] == "input_audio" for part in parts)
            assert tokens == plain + 16 + VIDEO_TOKENS + sounds * AUDIO_TOKENS


async def test_audio_is_the_same_by_data_url_and_as_input_audio(opened: Opened) -> None:
    async with opened() as viewer:
        text, tokens, _ = await viewer.ask(said(sound(LOW)))
        by_url = said(audio(data_url(LOW, "audio/wav")))
        assert await viewer.ask(by_url) == (text, tokens, (tokens - 1) // BLOCK)


async def test_salts_keep_equal_audio_apart(opened: Opened) -> None:
    async with opened() as viewer:
        await viewer.ask(said(sound(LOW)), extra_body={"cache_salt": "mine"})
        assert (await viewer.ask(said(sound(LOW)), extra_body={"cache_salt": "yours"}))[2] == 0


BAD = (
    (sound(b"OggS" + bytes(40)), "invalid_media", "input_audio.data", "none of WAV, MP3, FLAC"),
    (sound(LOW[:40]), "invalid_media", "input_audio.data", "WAV header is damaged"),
    (audio("data:audio/wav,AAAA"), "invalid_media", "audio_url.url", "not of the form"),
    (sound(wav(0.01)), "invalid_media", "input_audio.data", "too short"),
    (sound(wav(2.1, rate=8000)), "media_too_large", "input_audio.data", "2.1 s; 2 s are allowed"),
    (sound(bytes(49 << 10)), "media_too_large", "input_audio.data", "49152 bytes"),
    (audio("https://example.com/a.wav"), "media_url_refused", "audio_url.url", "does not fetch"),
    (film(b"RIFF" + bytes(40)), "invalid_media", "video_url.url", "it is not MP4"),
    (film(mp4(112, 84, 0)), "invalid_media", "video_url.url", "how many frames"),
    (film(mp4(1000, 84, 50)), "media_too_large", "video_url.url", "1000 x 84 pixels; 20000 are allowed"),
    (film(mp4(112, 84, 500)), "media_too_large", "video_url.url", "20.0 s; 10 s are allowed"),
)
"""Parts that are not served, and the codes, fields and messages of their refusals."""


async def test_what_is_no_small_file_is_refused_with_its_place(opened: Opened) -> None:
    async with opened() as viewer:
        for part, code, field, message in BAD:
            found = await viewer.refused(said(film(LAKE), part))
            assert found[:2] == (code, f"messages[0].content[1].{field}")
            assert message in found[2]


async def test_number_place_and_form_of_media_are_limited(opened: Opened) -> None:
    async with opened() as viewer:
        code, param, message = await viewer.refused(said(*[sound(LOW)] * 3))
        assert (code, param) == ("too_many_media", "messages[0].content[2].type")
        assert "3 audio files; 2 are allowed" in message
        system = [{**said(film(LAKE))[0], "role": "system"}, {"role": "user", "content": "x"}]
        assert (await viewer.refused(system))[:2] == ("invalid_value", "messages[0].content[0].type")
        assert (await viewer.refused(said(sound(LOW, "opus"))))[:2] == (
            "invalid_value",
            "messages[0].content[0].input_audio.format",
        )
        mixed = {**sound(LOW), "video_url": film(LAKE)["video_url"]}
        assert (await viewer.refused(said(mixed)))[:2] == (
            "invalid_value",
            "messages[0].content[0].video_url",
        )
        truncated = await viewer.refused(said(sound(LOW)), extra_body={"truncate_prompt_tokens": 20})
        assert truncated[:2] == ("invalid_value", "truncate_prompt_tokens")


async def test_a_model_that_takes_another_kind_says_which(opened: Opened) -> None:
    async with opened(takes="image audio") as viewer:
        code, param, message = await viewer.refused(said(film(LAKE)))
        assert (code, param) == ("unsupported_modality", "messages[0].content[0].type")
        assert "takes text, images and audio only here, and no videos" in message
        await viewer.ask(said(sound(LOW)))
    async with opened(takes="video", audio=AudioSpec(max_clips=0)) as viewer:
        assert "takes text and videos only here, and no audio." in (await viewer.refused(said(sound(LOW))))[2]
    async with opened(audio=AudioSpec(max_clips=0)) as viewer:
        why = (await viewer.refused(said(sound(LOW))))[2]
        assert why.endswith("and no audio: gateway.audio_inputs.max_clips is 0.")


async def test_audio_of_listed_origins_is_fetched(opened: Opened) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        assert b"accept: audio/*" in asked.lower()
        found = b"200 OK" if b"low.wav" in asked else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (found, len(LOW), LOW))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    listed = AUDIO.model_copy(update={"url_origins": (origin,), "url_private_address": True})
    async with opened(audio=listed) as viewer:
        text, tokens, _ = await viewer.ask(said(sound(LOW)))
        assert await viewer.ask(said(audio(f"{origin}/low.wav"))) == (text, tokens, (tokens - 1) // BLOCK)
        code, param, _ = await viewer.refused(said(audio(f"{origin}/no.wav")))
        assert (code, param) == ("media_fetch_failed", "messages[0].content[0].audio_url.url")
        # The origin is listed for audio, and not for videos.
        elsewhere = {"type": "video_url", "video_url": {"url": f"{origin}/low.wav"}}
        assert (await viewer.refused(said(elsewhere)))[0] == "media_url_refused"
    server.close()


async def test_responses_take_media_and_messages_say_that_they_have_none(opened: Opened) -> None:
    async with opened() as viewer:
        for part, sent in (
            (sound(LOW), sound(LOW)),
            (film(LAKE), {"type": "input_video", "video_url": data_url(LAKE, "video/mp4")}),
        ):
            text, tokens, _ = await viewer.ask(said(part))
            parts = [sent, {"type": "input_text", "text": TEXT}]
            body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0}
            response = await viewer.post("/v1/responses", body)
            assert response["output"][0]["content"][0]["text"] == text
            assert response["usage"]["input_tokens"] == tokens
            assert (await viewer.post("/tokenize", {"messages": said(part)}))["count"] == tokens
        blocks = [{"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": ""}}]
        asked = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 8}
        refused = (await viewer.post("/v1/messages", asked))["error"]
        assert refused["details"]["error_code"] == "unsupported_modality"
        assert "The Messages API has no audio" in refused["message"]
