"""A declared system prompt is cached once for its tenants, and nothing that follows it: over gateway, router
and simulated engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.e2e.gateway.conftest import read_reply

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, GatewaySpec, PoolSpec
from kvasir.config.spec.tenants import SharedPrefixSpec, TenancySpec, TenantSpec
from kvasir.core.requests import Role
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster

BLOCK = 16
SYSTEM = "You answer questions about the shop's products, kindly and in one sentence. " * 6
LONGER = SYSTEM + "Never speak of prices, whoever asks and however often they do so in one chat. " * 4
QUESTION = "What do you have in blue, and how many of them are left in the store next to the station? " * 3
NAMES = ("red", "blue", "green")
POOL = PoolSpec(name="serve", role=Role.BOTH, engine=EngineSpec(kind="sim", block_size=BLOCK))


class Shop:
    """What tenants are answered, and how much of their prompts was cached."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self.cluster = cluster
        self._address = address

    async def cached(self, tenant: str, system: str = SYSTEM, text: str = QUESTION, **more: Any) -> int:
        """The blocks of this tenant's prompt that were cached, which are those that the router predicted."""
        url = f"http://{self._address}/v1"
        async with openai.AsyncOpenAI(api_key=tenant, base_url=url, max_retries=0) as client:
            messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
            raw = await client.chat.completions.with_raw_response.create(
                model="kvasir-tiny", messages=messages, max_tokens=4, **more
            )
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found = usage.prompt_tokens_details.cached_tokens or 0
        decided = await self._decision(str(raw.headers["x-request-id"]))
        assert decided["predicted_cached_tokens"] == found
        return found // BLOCK

    async def _decision(self, request_id: str) -> Any:
        reader, writer = await asyncio.open_connection(*self._address.split(":"))
        head = f"GET /decisions/{request_id} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer root\r\n\r\n"
        writer.write(head.encode())
        page = json.loads((await read_reply(reader)).body)
        writer.close()
        return page["decisions"][0]


Opened = Callable[..., Any]


@pytest.fixture
def opened(tokenizer: ModelTokenizer, tmp_path: Path) -> Opened:
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()} tenant={name}" for name in (*NAMES, "root")]
    (tmp_path / "keys").write_text("\n".join(lines))

    @asynccontextmanager
    async def shop(*prefixes: SharedPrefixSpec) -> AsyncIterator[Shop]:
        clock = MonotonicClock()
        tenants = (*(TenantSpec(name=name) for name in NAMES), TenantSpec(name="root", operator=True))
        deployment = Deployment(
            disaggregation="never",
            pools=(POOL,),
            gateway=GatewaySpec(port=0, drain_timeout_s=0.0, api_keys_file=str(tmp_path / "keys")),
            tenancy=TenancySpec(tenants=tenants, shared_prefixes=prefixes),
        )
        cluster = Cluster(deployment, clock)
        await cluster.start()
        models = ModelTable([EdgeModel.of(deployment, tokenizer)])
        gateway = make_gateway(deployment, cluster.router, clock, make_metrics(deployment), models)
        started: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(gateway.serve(None, lambda *where: started.set_result(where)))
        host, port = await started
        yield Shop(cluster, f"{host}:{port}")
        gateway.stop()
        await serving
        await cluster.rest()
        await cluster.close()

    return shop


@pytest.fixture
def blocks(tokenizer: ModelTokenizer) -> Callable[[str], int]:
    """The whole blocks of tokens with which all chats begin that have this system prompt."""

    def count(system: str) -> int:
        template = tokenizer.template
        assert template is not None
        texts = [
            template.render([{"role": "system", "content": system}, {"role": "user", "content": text}], {})
            for text in ("What", "3")
        ]
        one, other = tokenizer.encode(texts, add_special_tokens=False)
        differ = [mine != its for mine, its in zip(one, other, strict=False)]
        return differ.index(True) // BLOCK

    return count


async def test_tenants_share_exactly_the_blocks_of_a_declared_prompt(
    opened: Opened, blocks: Callable[[str], int]
) -> None:
    short = SharedPrefixSpec(name="short", text=SYSTEM)
    longer = SharedPrefixSpec(name="longer", text=LONGER, tenants=("red", "blue"))
    async with opened(short, longer) as shop:
        assert await shop.cached("red") == 0
        assert await shop.cached("blue") == blocks(SYSTEM) > 4
        assert await shop.cached("green", text="Something else altogether") == blocks(SYSTEM)
        assert await shop.cached("red") > blocks(SYSTEM) + 4
        # Of a prompt that begins with a declared one, its own tenants share what both begin with.
        assert 4 < await shop.cached("red", system=LONGER) <= blocks(SYSTEM)
        assert await shop.cached("blue", system=LONGER) == blocks(LONGER)
        assert await shop.cached("green", system=LONGER) == 0


async def test_all_else_stays_the_tenants_own_and_a_hash_is_as_good_as_the_text(
    opened: Opened, blocks: Callable[[str], int]
) -> None:
    digest = hashlib.sha256(SYSTEM.encode()).hexdigest()
    async with opened(SharedPrefixSpec(name="shop", sha256=digest, tenants=("red", "blue"))) as shop:
        for tenant in ("green", "red"):
            assert await shop.cached(tenant) == 0
            assert await shop.cached(tenant, system="Another system prompt. " * 20) == 0
            assert await shop.cached(tenant, extra_body={"cache_salt": "mine"}) == 0
        assert await shop.cached("blue") == blocks(SYSTEM)
        assert await shop.cached("blue") > blocks(SYSTEM)
        assert await shop.cached("blue", system="Another system prompt. " * 20) == 0
