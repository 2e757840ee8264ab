"""A gateway on a real socket in front of a scripted router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.kit.browser.tab import RunningBrowser, Tab, running_browser
from tests.kit.engines.vllm_reference import Reference, reference
from tests.kit.gateway.http_edge import listening
from tests.kit.gateway.scripted_router import ScriptedRouter
from tests.kit.stack import ADAPTER, CONTEXT
from tests.kit.suite.loops import new_uvloop

from kvasir.clock import MonotonicClock
from kvasir.config.load.model_files import Matryoshka, resolve_model
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    GatewaySpec,
    LoraSpec,
    PoolSpec,
    RoutingSpec,
    SloSpec,
)
from kvasir.core.requests import Role
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.cli.main import main
from kvasir_platform.gateway.app import Gateway
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.prompt.pairs import Classifier
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster

MODEL = "kvasir-tiny"


@dataclass
class Reply:
    """One parsed HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Edge:
    """A running gateway and the ways to poke it."""

    gateway: Gateway
    router: ScriptedRouter
    metrics: Metrics
    host: str
    port: int
    serving: asyncio.Task[None]
    clients: AsyncExitStack

    async def client(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's own client, pointed here, without retries."""
        options = {"api_key": "secret", "max_retries": 0, **options}
        made = openai.AsyncOpenAI(base_url=f"http://{self.host}:{self.port}/v1", **options)
        return await self.clients.enter_async_context(made)

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port, **options)
        self.clients.push_async_callback(_close, writer)
        return reader, writer

    async def raw(self, data: bytes) -> Reply:
        """Send bytes on a connection of their own and read one answer."""
        reader, writer = await self.connect()
        writer.write(data)
        return await read_reply(reader)

    async def read(self, reader: asyncio.StreamReader) -> Reply:
        """Read one answer with a Content-Length, or a chunked one, whole."""
        return await read_reply(reader)

    async def post(self, path: str, body: bytes, headers: str = "") -> Reply:
        """POST a JSON body."""
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}"
        return await self.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def get(self, path: str, headers: str = "") -> Reply:
        """GET a path."""
        return await self.raw(f"GET {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n".encode())


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read one answer with a Content-Length, or a chunked one, whole."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int((await reader.readline()).strip(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return Reply(int(first.split()[1]), headers, body)


@pytest.fixture(scope="session")
def browser() -> Iterator[RunningBrowser]:
    """The browser of all tests of a process."""
    with running_browser() as browser:
        yield browser


@pytest_asyncio.fixture
async def tab(browser: RunningBrowser) -> AsyncIterator[Tab]:
    """A tab with a profile of its own."""
    async with browser.tab() as tab:
        yield tab


EdgeFactory = Callable[..., Awaitable[Edge]]


TRANSPORT = {"test_drains.py", "test_hostile_clients.py", "test_openai_client.py"}
"""Modules about connections."""


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return uvloop, which serves, and for modules about connections asyncio too, which other tests use."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": new_uvloop}
    if item.path.name in TRANSPORT:
        loops["asyncio"] = asyncio.SelectorEventLoop
    return loops


@pytest.fixture(scope="session")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.from_folder(resolve_model(MODEL))


@asynccontextmanager
async def running(
    tokenizer: ModelTokenizer,
    spans: SpanRecorder | None = None,
    *,
    slo: Sequence[SloSpec] = (SloSpec(name="default"),),
    decision_records: int = 4096,
    capabilities: ModelCapabilities | None = None,
    classifier: Classifier | None = None,
    costs: CostKeeper | None = None,
    deployed: Mapping[str, Any] = MappingProxyType({}),
    **spec: Any,
) -> AsyncIterator[Edge]:
    """A gateway that serves until the block ends, and then leaves nothing open; `spec` is its own part of the
    deployment, `deployed` are other parts, and `capabilities` and `classifier` are those of its only model,
    where they are not the deployment's. Without `costs` they are not counted."""
    clock = MonotonicClock()
    deployment = Deployment(
        gateway=GatewaySpec(**{"port": 0, "drain_timeout_s": 0.0, **spec}),
        lora=(LoraSpec(name="pirate", path="adapters/pirate"),),
        slo=tuple(slo),
        routing=RoutingSpec(decision_records=decision_records),
        **deployed,
    )
    router = ScriptedRouter(clock)
    metrics = make_metrics(deployment)
    made = [
        EdgeModel.of(view, tokenizer, Matryoshka() if view.model.matryoshka else None, classifier=classifier)
        for view in deployment.views()
    ]
    models = ModelTable(made if capabilities is None else [replace(made[0], capabilities=capabilities)])
    gateway = make_gateway(deployment, router, clock, metrics, models, spans=spans, costs=costs)
    async with listening(gateway) as at, AsyncExitStack() as clients:
        yield Edge(gateway, router, metrics, *at, clients)


@pytest_asyncio.fixture
async def start(tokenizer: ModelTokenizer) -> AsyncIterator[EdgeFactory]:
    """Start gateways with settings of the test's own."""
    async with AsyncExitStack() as edges:

        async def factory(**spec: Any) -> Edge:
            return await edges.enter_async_context(running(tokenizer, **spec))

        yield factory


@pytest_asyncio.fixture
async def edge(start: EdgeFactory) -> Edge:
    """A gateway with default settings."""
    return await start()


ENGINE = EngineSpec(kind="sim", block_size=32)
POOLS = (
    PoolSpec(name="prefill", role=Role.PREFILL, replicas=2, engine=ENGINE),
    PoolSpec(name="decode", role=Role.DECODE, replicas=2, engine=ENGINE),
)
STORY = "Once upon a time there was a router that knew what every worker holds. " * 20


@dataclass
class Product:
    """Everything but real engines, behind one address."""

    cluster: Cluster
    client: openai.AsyncOpenAI
    address: str

    async def ask(self, text: str = STORY, max_tokens: int = 8, **headers: str) -> str:
        """Send a prompt, the same as ever by default; returns the id that the answer carried."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model="kvasir-tiny",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            extra_headers=headers,
        )
        raw.parse()
        return str(raw.headers["x-request-id"])

    async def kvasir(self, *arguments: str) -> int:
        """The command line, asking this gateway."""
        return await asyncio.to_thread(main, [*arguments, "--address", self.address])


@asynccontextmanager
async def deployed(
    tokenizer: ModelTokenizer, parts: Mapping[str, Any] = MappingProxyType({})
) -> AsyncIterator[Product]:
    """A product until the block ends; `parts` of its deployment are not the defaults."""
    clock = MonotonicClock()
    deployment = Deployment(**{"pools": POOLS, "gateway": GatewaySpec(port=0, drain_timeout_s=0.0), **parts})
    metrics = make_metrics(deployment)
    cluster = Cluster(deployment, clock, on_decision=metrics.decided)
    await cluster.start()
    metrics.track_index(cluster.router.index_stats)
    models = ModelTable([EdgeModel.of(deployment, tokenizer)])
    gateway = make_gateway(deployment, cluster.router, clock, metrics, models)
    async with (
        listening(gateway) as (host, port, _),
        openai.AsyncOpenAI(api_key="x", base_url=f"http://{host}:{port}/v1", max_retries=0) as client,
    ):
        yield Product(cluster, client, f"{host}:{port}")
    await cluster.rest()
    await cluster.close()


@pytest_asyncio.fixture
async def product(tokenizer: ModelTokenizer) -> AsyncIterator[Product]:
    async with deployed(tokenizer) as made:
        yield made


@pytest.fixture(scope="package")
def alone() -> Iterator[Reference]:
    """vLLM alone, to compare with the default deployment."""
    pytest.importorskip("vllm")
    with reference(resolve_model(MODEL), ADAPTER, max_model_len=CONTEXT) as made:
        yield made
