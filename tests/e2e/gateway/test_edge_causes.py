"""Codes of gateways that are full, too slow or cut off from the router or from another cell, each caused over
real sockets and the product's own links."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from tests.kit.gateway.edge_link import Linked, core_parts, far_core, linked
from tests.kit.gateway.http_edge import listening, models_of
from tests.kit.sim.cells import SimCells
from tests.kit.sim.product import ENGINE, GATEWAY, POOL, STREAM, WITHIN_S, error_of, product

from kvasir.clock import MonotonicClock
from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, TokenizerSpec
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.prompt.tokenization import Encoding, ModelTokenizer, TokenizerPool
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_router.shell import Router

QUICK = POOL | {"engine": ENGINE | {"sim": {"decode_step_s": 0.001, "decode_step_per_seq_s": 0.0}}}
MOST_WAITING = 256
LONG = (
    b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: 39\r\n\r\n"
    b'{"model":"kvasir-tiny","prompt":"long"}'
)
#: Sampled anew, and with a penalty on what was said: nobody else can go on with it.
DRAWN = STREAM | {"temperature": 0.7, "presence_penalty": 0.5}


async def test_bodies_beyond_what_the_gateway_holds_are_refused() -> None:
    async with product(gateway={**GATEWAY, "max_bodies_bytes": 1024}) as served:
        answer = await served.ask(prompt="a" * 4096)
        assert "limit on buffered request bodies" in error_of(answer, "bodies_full")
        assert (await served.ask()).status_code == 200


class Held(ModelTokenizer):
    """A tokenizer whose work ends when it is let."""

    go_on: threading.Event

    def begin(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> Encoding:
        encoding = super().begin(texts, add_special_tokens=add_special_tokens, salt=salt)

        def finish() -> Any:
            self.go_on.wait(WITHIN_S)
            return encoding.finish()

        return Encoding(1e6, finish)


async def test_long_prompts_beyond_those_that_wait_for_the_tokenizer_are_refused() -> None:
    tokenizer = Held.from_folder(resolve_model("kvasir-tiny"), TokenizerSpec())
    assert isinstance(tokenizer, Held)
    tokenizer.go_on = threading.Event()

    def table(deployment: Deployment) -> ModelTable:
        return ModelTable([EdgeModel.of(deployment, TokenizerPool(tokenizer))])

    async with product(table=table) as served, AsyncExitStack() as opened:
        replies = []
        for _ in range(MOST_WAITING + 1):
            reader, writer = await asyncio.open_connection(*served.address.split(":"))
            opened.callback(writer.close)
            writer.write(LONG)
            replies.append(asyncio.create_task(reader.read()))
        done, waiting = await asyncio.wait(replies, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        head, _, body = refused.result().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "tokenizer_busy"
        tokenizer.go_on.set()
        for reply in await asyncio.gather(*waiting):
            assert reply.startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def apart() -> AsyncIterator[tuple[Linked, Router, httpx.AsyncClient]]:
    """A gateway and its router at two ends of a link, and a client of the gateway."""
    async with (
        product(pools=[QUICK]) as served,
        linked(core_parts(served.cluster.router), max_waiting_bytes=4096) as both,
    ):
        deployment = served.cluster.deployment
        gateway = make_gateway(
            deployment, far_core(both), MonotonicClock(), make_metrics(deployment), models_of(deployment)
        )
        async with (
            listening(gateway) as (host, port, _),
            httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=WITHIN_S) as client,
        ):
            yield both, served.cluster.router, client


async def test_streams_of_an_edge_that_cannot_keep_up_end_and_it_goes_on() -> None:
    async with apart() as (both, router, client):
        both.shorten()
        async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            both.hold()
            async with asyncio.timeout(WITHIN_S):
                while router.in_flight:
                    await asyncio.sleep(0.01)
            both.hold(holding=False)
            said = [line async for line in lines if line]
        error = json.loads(said[-1].removeprefix("data: "))["error"]
        assert error["code"] == "edge_overloaded"
        assert "reads too slowly" in error["message"]
        again = await client.post("/v1/completions", json=STREAM | {"stream": False, "max_tokens": 4})
        assert again.status_code == 200


async def test_streams_of_a_router_that_ended_end_with_it_and_later_calls_are_refused() -> None:
    async with apart() as (both, _, client):
        async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            both.end.abort()
            said = [line async for line in lines if line]
        error = json.loads(said[-1].removeprefix("data: "))["error"]
        assert error["code"] == "router_lost"
        later = await client.post("/v1/completions", json=STREAM)
        assert "The router has ended" in error_of(later, "router_lost")


async def test_a_stream_that_no_other_cell_can_go_on_with_ends_with_its_cell() -> None:
    deployment = Deployment.model_validate({"disaggregation": "never", "pools": [POOL], "gateway": GATEWAY})
    async with (
        SimCells(deployment, MonotonicClock(), {("eu", "us"): 0.001}, lost_after_s=1.0) as cells,
        AsyncExitStack() as stack,
    ):
        home = cells["eu"]
        for worker in list(home.cluster.workers):
            await home.cluster.kill(worker)
            await home.cluster.forget(worker)
        spec = home.deployment
        gateway = make_gateway(
            spec,
            home.router,
            MonotonicClock(),
            make_metrics(spec),
            models_of(spec),
            limits_over=home.router.limits,
        )
        host, port, _ = await stack.enter_async_context(listening(gateway))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=WITHIN_S)
        )
        async with client.stream("POST", "/v1/completions", json=DRAWN) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            cells.links.cut("us")
            said = [line async for line in lines if line]
        error = json.loads(said[-1].removeprefix("data: "))["error"]
        assert error["code"] == "cell_lost"
        assert error["message"].endswith("send the request again.")
