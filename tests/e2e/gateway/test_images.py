"""Images in chats: over gateway, router and simulated engines, whose KV depends on the images."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from tests.kit.media.image_files import bomb, data_url, png
from tests.kit.media.viewers import APART, BLOCK, WHOLE, Viewer, open_viewer
from tests.kit.models.media_tokenizer import make_media_tokenizer
from tests.kit.models.vision import IMAGE_TOKENS, PLACEHOLDER

from kvasir.checkpoint.media.images import FixedTokens
from kvasir.checkpoint.media.rules import MediaRules
from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir.config.spec.media.inputs import ImagesSpec
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from kvasir_router.sessions.session import SessionLimits

RED, BLUE = png(8, 8, (255, 0, 0)), png(8, 8, (0, 0, 255))
LIMITS = ImagesSpec(max_images=3, max_bytes=4096, max_pixels=1000)
TEXT = "What is in this picture, and which colours does it have? Answer in one short sentence, please. " * 2


def seen(*images: bytes, text: str = TEXT) -> list[Any]:
    """Messages with images before their text."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def vision_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, int]:
    folder = tmp_path_factory.mktemp("vision")
    (placeholder,) = make_media_tokenizer(folder, {"image": PLACEHOLDER}).values()
    return ModelTokenizer.from_folder(folder, Deployment().tokenizer), placeholder


@pytest.fixture
def opened(vision_tokenizer: tuple[ModelTokenizer, int]) -> Opened:
    tokenizer, placeholder = vision_tokenizer

    @asynccontextmanager
    async def viewer(
        *, takes: bool = True, pools: Any = WHOLE, max_body_bytes: int = 8 << 20, **images: Any
    ) -> AsyncIterator[Viewer]:
        rules = MediaRules(image=FixedTokens(placeholder, IMAGE_TOKENS) if takes else None)
        limits = LIMITS.model_copy(update=images)
        spec = GatewaySpec(image_inputs=limits, max_body_bytes=max_body_bytes)
        async with open_viewer(tokenizer, rules, spec, pools) as opened:
            yield opened

    return viewer


@pytest.mark.parametrize("pools", [WHOLE, APART], ids=["aggregated", "disaggregated"])
async def test_equal_texts_share_blocks_only_as_far_as_their_images_are_equal(
    opened: Opened, pools: Any
) -> None:
    async with opened(pools=pools) as viewer:
        red, tokens, cached = await viewer.ask(seen(RED))
        assert cached == 0
        assert (await viewer.ask(seen(RED)))[2] == (tokens - 1) // BLOCK > 2
        blue, same, cached = await viewer.ask(seen(BLUE))
        # The image begins in the first block, so that nothing is shared but a block before it.
        assert (same, cached) == (tokens, 0)
        assert red != blue
        assert (await viewer.ask(seen(RED)))[0] == red
        both = await viewer.ask(seen(RED, BLUE))
        assert both[1] == tokens + IMAGE_TOKENS
        swapped, _, cached = await viewer.ask(seen(BLUE, RED))
        assert swapped != both[0]
        assert cached <= 2


async def test_an_image_later_in_a_conversation_leaves_what_is_before_it_shared(opened: Opened) -> None:
    before = [{"role": "user", "content": TEXT * 2}, {"role": "assistant", "content": "Let me see it."}]
    async with opened() as viewer:
        _, tokens, _ = await viewer.ask([*before, *seen(RED)])
        _, _, cached = await viewer.ask([*before, *seen(BLUE)])
        assert 3 < cached < (tokens - IMAGE_TOKENS) // BLOCK


async def test_salts_keep_equal_images_apart(opened: Opened) -> None:
    async with opened() as viewer:
        await viewer.ask(seen(RED), extra_body={"cache_salt": "mine"})
        assert (await viewer.ask(seen(RED), extra_body={"cache_salt": "yours"}))[2] == 0


async def test_a_stream_with_an_image_goes_on_when_its_worker_is_lost(opened: Opened) -> None:
    async with opened() as viewer:
        whole = await viewer.client.chat.completions.create(
            model="kvasir-tiny", messages=seen(RED), max_tokens=200, temperature=0
        )
        stream = await viewer.client.chat.completions.create(
            model="kvasir-tiny", messages=seen(RED), max_tokens=200, temperature=0, stream=True
        )
        text = ""
        killed = False
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if text and not killed:
                killed = True
                workers = viewer.cluster.workers.items()
                (busy,) = [name for name, each in workers if each.engine.load().running]
                await viewer.cluster.kill(busy)
        assert killed
        assert text == whole.choices[0].message.content


BAD = (
    ("data:image/png;base64,AAAA", "invalid_image"),
    ("data:image/png;base64,????", "invalid_image"),
    ("data:image/png,AAAA", "invalid_image"),
    (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "invalid_image"),
    (data_url(RED + bytes(4096)), "image_too_large"),
    (data_url(bomb(60_000, 60_000)), "image_too_large"),
    ("https://example.com/cat.png", "image_url_refused"),
    ("http://169.254.169.254/latest", "image_url_refused"),
    ("file:///etc/passwd", "image_url_refused"),
)
"""URLs of what is no image, or too large, and the codes of their refusals."""


async def test_what_is_no_small_image_is_refused_with_its_place(opened: Opened) -> None:
    async with opened() as viewer:
        for url, code in BAD:
            messages = seen(RED)
            messages[0]["content"].insert(1, {"type": "image_url", "image_url": {"url": url}})
            found = await viewer.refused(messages)
            assert found[:2] == (code, "messages[0].content[1].image_url.url")
            assert "AAAA" not in found[2]


async def test_images_of_listed_origins_are_fetched(opened: Opened) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        found = b"200 OK" if b"red.png" in asked else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (found, len(RED), RED))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    listed = {"url_origins": (origin,), "url_private_address": True}
    async with opened(**listed) as viewer:
        text, tokens, _ = await viewer.ask(seen(RED))
        messages = seen(RED)
        messages[0]["content"][0]["image_url"]["url"] = f"{origin}/red.png"
        assert await viewer.ask(messages) == (text, tokens, (tokens - 1) // BLOCK)
        messages[0]["content"][0]["image_url"]["url"] = f"{origin}/no.png"
        code, param, why = await viewer.refused(messages)
        assert (code, param) == ("image_fetch_failed", "messages[0].content[0].image_url.url")
        assert "404" in why
        messages[0]["content"][0]["image_url"]["url"] = "http://127.0.0.1:1/red.png"
        assert (await viewer.refused(messages))[0] == "image_url_refused"
    async with opened(takes=False, **listed) as viewer:
        assert (await viewer.refused(seen(RED)))[0] == "unsupported_modality"
    server.close()


async def test_number_and_place_of_images_are_limited(opened: Opened) -> None:
    async with opened() as viewer:
        code, param, message = await viewer.refused(seen(*[RED] * 4))
        assert (code, param) == ("too_many_images", "messages[0].content[3].type")
        assert "4 images; 3 are allowed" in message
        system = [{**seen(RED)[0], "role": "system"}, {"role": "user", "content": "x"}]
        assert (await viewer.refused(system))[:2] == ("invalid_value", "messages[0].content[0].type")
        truncated = await viewer.refused(seen(RED), extra_body={"truncate_prompt_tokens": 20})
        assert truncated[:2] == ("invalid_value", "truncate_prompt_tokens")
        ends = await viewer.refused(
            [{"role": "user", "content": seen(RED)[0]["content"][:1]}],
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert ends[:2] == ("invalid_value", "continue_final_message")


async def test_a_placeholder_that_a_client_writes_is_text(opened: Opened) -> None:
    async with opened() as viewer:
        _, tokens, _ = await viewer.ask(seen(RED, text="<image>"))
        _, plain, _ = await viewer.ask(seen(RED, text="x"))
        assert plain < tokens < plain + IMAGE_TOKENS


async def test_a_model_of_text_refuses_images_by_its_name(opened: Opened) -> None:
    for options in ({"takes": False}, {"max_images": 0}):
        async with opened(**options) as viewer:
            code, param, message = await viewer.refused(seen(RED))
            assert (code, param) == ("unsupported_modality", "messages[0].content[0].type")
            assert "'kvasir-tiny' takes text only" in message


async def test_images_beyond_what_a_worker_is_sent_of_one_request_are_refused(opened: Opened) -> None:
    each = SessionLimits().request_bytes // 2
    async with opened(max_body_bytes=4 * each, max_bytes=2 * each) as viewer:
        code, _, message = await viewer.refused(seen(RED + bytes(each), BLUE + bytes(each)))
        assert code == "request_too_large"
        assert f"the limit is {2 * each}" in message
        await viewer.ask(seen(RED))


async def test_images_in_flight_are_bounded_and_given_back(opened: Opened) -> None:
    async with opened(max_held_bytes=max(1024, len(RED))) as viewer:
        large = RED + bytes(900)
        many = [
            viewer.client.chat.completions.create(
                model="kvasir-tiny", messages=seen(large), max_tokens=64, stream=False
            )
            for _ in range(3)
        ]
        ended = await asyncio.gather(*many, return_exceptions=True)
        busy = [each for each in ended if isinstance(each, openai.APIStatusError)]
        assert {(each.status_code, each.code) for each in busy} == {(503, "images_busy")}
        assert 0 < len(busy) < 3
        await viewer.ask(seen(large))


async def test_responses_messages_and_counts_see_the_same_prompt(opened: Opened) -> None:
    async with opened() as viewer:
        said, tokens, _ = await viewer.ask(seen(RED))
        url = data_url(RED)
        parts = [
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_text", "text": TEXT},
        ]
        response = await viewer.post(
            "/v1/responses",
            {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0},
        )
        assert response["output"][0]["content"][0]["text"] == said
        assert response["usage"]["input_tokens"] == tokens
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
        asked = {"messages": [{"role": "user", "content": blocks}]}
        message = await viewer.post("/v1/messages", {**asked, "max_tokens": 8, "temperature": 0})
        assert message["content"][0]["text"] == said
        assert (await viewer.post("/v1/messages/count_tokens", asked))["input_tokens"] == tokens
        assert (await viewer.post("/tokenize", {"messages": seen(RED)}))["count"] == tokens
        again = await viewer.post(
            "/v1/responses",
            {"previous_response_id": response["id"], "input": "And now?", "max_output_tokens": 4},
        )
        assert again["usage"]["input_tokens"] > tokens + 8
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= (tokens - 1) // BLOCK * BLOCK
        elsewhere = [{"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}]
        body = {"messages": [{"role": "user", "content": elsewhere}], "max_tokens": 8}
        refused = await viewer.post("/v1/messages", body)
        assert refused["error"]["details"]["error_code"] == "image_url_refused"
