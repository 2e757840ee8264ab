"""Videos and images in chats, on real vLLM engines of three families of models under `kvasir up`: the tokens
that plain vLLM makes of the same frames, KV that no other video shares, a hand-off of every prompt, refusals.

vLLM needs torchvision for this, which only the processes of these tests have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.kit.media.films import HEIGHT, WIDTH, mp4_film
from tests.kit.media.image_files import data_url, png
from tests.kit.media.torchvision_folder import torchvision_folder
from tests.kit.models.llava_video import FRAME_TOKENS, make_llava_video_model
from tests.kit.models.video import CELL, TOGETHER, make_video_model

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.soak]
StartStack = Callable[..., AbstractContextManager["Stack"]]
Part = dict[str, Any]

BLOCK, FRAMES, TOKENS = 32, 8, 16
QWEN_TOKENS = FRAMES // TOGETHER * (WIDTH // CELL) * (HEIGHT // CELL)
DEPLOYMENT = """
model: {{source: {model}, served_name: watcher, dtype: float32, max_model_len: 1024}}
disaggregation: always
pools:
  - {{name: prefill, role: prefill, engine: {engine}}}
  - {{name: decode, role: decode, engine: {engine}}}
gateway: {{video_inputs: {{max_videos: 1, frames: 8, max_seconds: 3, max_pixels: 10000}}}}
"""
ENGINE = "{block_size: 32, kv_cache_bytes: 33554432, threads: 1}"
BEFORE, AFTER = "Look at this film, and at nothing else, please. " * 3, "What do you see in it? " * 4


def film(data: bytes) -> Part:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


FILE = mp4_film(10, frames=48)
LAKE, WOOD = film(FILE), film(mp4_film(200, frames=48))
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png(70, 50, (250, 20, 20)))}}
CHATS = {"lake": [LAKE], "wood": [WOOD], "picture": [PICTURE], "both": [PICTURE, LAKE]}


@dataclass(frozen=True, slots=True)
class Family:
    """How to make a model, how many tokens it makes of a film, and the chats that it takes."""

    make: Callable[[Path], Path]
    tokens: int
    chats: tuple[str, ...] = tuple(CHATS)


FAMILIES = {
    "Qwen2-VL": Family(partial(make_video_model, family="Qwen2VL"), QWEN_TOKENS),
    "Qwen2.5-VL": Family(partial(make_video_model, family="Qwen2_5_VL"), QWEN_TOKENS),
    "LLaVA-NeXT-Video": Family(make_llava_video_model, FRAMES * FRAME_TOKENS, ("lake", "wood")),
}


def messages(*media: Part) -> list[dict[str, Any]]:
    """Messages with media between two texts."""
    texts = [{"type": "text", "text": text} for text in (BEFORE, AFTER)]
    return [{"role": "user", "content": [texts[0], *media, texts[1]]}]


@dataclass(frozen=True, slots=True)
class Cinema:
    """A deployment of a model that takes videos, and what plain vLLM makes of the chats: how many tokens the
    prompt has, and the tokens of the answer."""

    stack: Stack
    family: Family
    alone: dict[str, tuple[int, list[int]]]

    def post(self, *media: Part, **more: Any) -> httpx.Response:
        body = {"model": "watcher", "messages": messages(*media), "temperature": 0, "max_tokens": TOKENS}
        body |= {"ignore_eos": True, "return_token_ids": True, **more}
        return httpx.post(f"{self.stack.url}/v1/chat/completions", json=body, timeout=60)

    def ask(self, name: str, salt: str) -> tuple[tuple[int, list[int]], int]:
        """The tokens of the prompt and those of the answer, and how many were cached, which are those that
        the router expected."""
        answer = self.post(*CHATS[name], cache_salt=salt).raise_for_status()
        (decided,) = self.stack.page(f"/decisions/{answer.headers['x-request-id']}").json()["decisions"]
        assert decided["mode"] == "disaggregated"
        body = answer.json()
        cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert decided["predicted_cached_tokens"] == cached
        return (body["usage"]["prompt_tokens"], body["choices"][0]["token_ids"]), cached

    def refused(self, *media: Part) -> tuple[int, str, str]:
        """The status, the code and the message of a refusal."""
        answer = self.post(*media)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["message"]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def cinema(
    request: pytest.FixtureRequest, start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cinema]:
    pytest.importorskip("vllm")
    home = tmp_path_factory.mktemp("cinema")
    family: Family = request.param
    model = family.make(home / "model")
    with pytest.MonkeyPatch.context() as patched:
        paths = [os.environ.get("PYTHONPATH", ""), str(torchvision_folder())]
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        found = home / "answers"
        plain = [sys.executable, "-m", "tests.kit.media.plain_videos", str(model), str(FRAMES), str(TOKENS)]
        subprocess.run(
            [*plain, str(found)],
            input=json.dumps([messages(*CHATS[name]) for name in family.chats]).encode(),
            cwd=Path(__file__).parents[2],
            check=True,
        )
        answers = [tuple(json.loads(line)) for line in found.read_text().splitlines()]
        spec = home / "kvasir.yaml"
        spec.write_text(DEPLOYMENT.format(model=model, engine=ENGINE))
        with start_stack(home, "-f", str(spec)) as stack:
            yield Cinema(stack, family, dict(zip(family.chats, answers, strict=True)))


def test_answers_are_those_of_plain_vllm_with_prefill_and_decode_apart(cinema: Cinema) -> None:
    assert len({str(tokens) for _, tokens in cinema.alone.values()}) == len(cinema.alone), "it does not look"
    for name, (length, tokens) in cinema.alone.items():
        before = cinema.stack.metric("kvasir_transferred_tokens_total")
        assert cinema.ask(name, name) == ((length, tokens), 0)
        assert cinema.stack.metric("kvasir_transferred_tokens_total") - before == length - 1


def test_kv_is_shared_up_to_the_first_video_that_differs(cinema: Cinema) -> None:
    lake, wood = cinema.alone["lake"], cinema.alone["wood"]
    assert cinema.ask("lake", "shared") == (lake, 0)
    assert cinema.ask("lake", "shared") == (lake, (lake[0] - 1) // BLOCK * BLOCK)
    other, cached = cinema.ask("wood", "shared")
    assert other == wood
    # The text before the film is the same, and longer than a block.
    assert BLOCK <= cached < lake[0] - cinema.family.tokens
    assert cinema.ask("lake", "another")[1] == 0


def test_what_cannot_be_served_is_refused_with_a_code_and_the_next_video_is_answered(cinema: Cinema) -> None:
    status, code, message = cinema.refused(film(mp4_film(1, frames=100)))
    assert (status, code) == (400, "media_too_large")
    assert "4.2 s; 3 s are allowed" in message
    status, code, message = cinema.refused(film(b"RIFF" + bytes(60)))
    assert (status, code) == (400, "invalid_media")
    assert "not MP4" in message
    assert cinema.refused(LAKE, WOOD)[:2] == (400, "too_many_media")
    # Zeros in place of frames: a worker finds this when it decodes them.
    at = FILE.index(b"mdat") + 4
    end = at - 8 + int.from_bytes(FILE[at - 8 : at - 4], "big")
    status, code, message = cinema.refused(film(FILE[: at + 3000] + bytes(end - at - 3000) + FILE[end:]))
    assert (status, code) == (400, "invalid_value")
    assert "video 0 cannot be decoded: its header says 48 frames of 112 x 84" in message
    assert cinema.ask("lake", "after") == (cinema.alone["lake"], 0)
