"""A request is freed when it ends: one that waits for a collection keeps its body and its tokens."""

from __future__ import annotations

import gc
import json

import httpx
import pytest
from tests.kit.gateway.http_edge import serving
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.requests import FinishReason
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.serving.generate_api import GenerateCall
from kvasir_platform.gateway.serving.generation import Generation, PromptStream


def answer(stream: ScriptedStream) -> None:
    stream.emit("Hello")
    stream.emit(" there", finish=FinishReason.STOP)
    stream.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_request_is_left_for_the_collector(stream: bool) -> None:
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, "model": "kvasir-tiny"}
    )
    async with serving() as edge, httpx.AsyncClient(base_url=f"http://{edge.host}:{edge.port}") as client:
        edge.router.script = answer
        (await client.post("/v1/chat/completions", content=body)).raise_for_status()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                (await client.post("/v1/chat/completions", content=body)).raise_for_status()
            edge.router.streams.clear()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each) for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left & {Exchange, HttpRequest, GenerateCall, Generation, PromptStream}
