"""A client of a model that takes media, over gateway, router and simulated engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from tests.kit.gateway.http_edge import listening

from kvasir.checkpoint.media.rules import MediaRules
from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, GatewaySpec, ModelSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster

BLOCK = 16
_ENGINE = EngineSpec(kind="sim", block_size=BLOCK)
WHOLE = (PoolSpec(name="serve", role=Role.BOTH, replicas=2, engine=_ENGINE),)
APART = tuple(PoolSpec(name=role.value, role=role, engine=_ENGINE) for role in (Role.PREFILL, Role.DECODE))


@dataclass
class Viewer:
    """A client of a model that takes images, and its fleet."""

    cluster: Cluster
    client: openai.AsyncOpenAI
    address: str

    async def ask(self, messages: list[Any], **more: Any) -> tuple[str, int, int]:
        """The answer, the tokens of the prompt, and the whole blocks of it that were cached, which are those
        that the router expected."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model="kvasir-tiny", messages=messages, max_tokens=8, temperature=0, **more
        )
        done = raw.parse()
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        cached = done.usage.prompt_tokens_details.cached_tokens or 0
        decided = await self.decision(str(raw.headers["x-request-id"]))
        assert decided["predicted_cached_tokens"] == cached
        return done.choices[0].message.content or "", done.usage.prompt_tokens, cached // BLOCK

    async def decision(self, request_id: str) -> Any:
        reader, writer = await asyncio.open_connection(*self.address.split(":"))
        writer.write(f"GET /decisions/{request_id} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        page = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        return json.loads(page)["decisions"][0]

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of any endpoint."""
        reader, writer = await asyncio.open_connection(*self.address.split(":"))
        data = json.dumps({"model": "kvasir-tiny", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        return answer

    async def refused(self, messages: list[Any], **more: Any) -> Any:
        """The error of a chat that is refused: its code, field and message."""
        with pytest.raises(openai.APIStatusError) as caught:
            await self.client.chat.completions.create(model="kvasir-tiny", messages=messages, **more)
        body: Any = caught.value.body
        return body["code"], body["param"], body["message"]


@asynccontextmanager
async def open_viewer(
    tokenizer: ModelTokenizer,
    rules: MediaRules,
    spec: GatewaySpec,
    pools: Sequence[PoolSpec] = WHOLE,
) -> AsyncIterator[Viewer]:
    """Yield a client of a model with these rules. `spec` has the limits on media."""
    clock = MonotonicClock()
    deployment = Deployment(
        model=ModelSpec(source="kvasir-tiny"),
        disaggregation="never" if pools is WHOLE else "always",
        pools=tuple(pools),
        gateway=spec.model_copy(update={"port": 0, "drain_timeout_s": 0.0}),
    )
    cluster = Cluster(deployment, clock)
    await cluster.start()
    models = ModelTable([EdgeModel.of(deployment, tokenizer, media=rules)])
    gateway = make_gateway(deployment, cluster.router, clock, make_metrics(deployment), models)
    async with (
        listening(gateway) as (host, port, _),
        openai.AsyncOpenAI(api_key="x", base_url=f"http://{host}:{port}/v1", max_retries=0) as client,
    ):
        yield Viewer(cluster, client, f"{host}:{port}")
    await cluster.rest()
    await cluster.close()
