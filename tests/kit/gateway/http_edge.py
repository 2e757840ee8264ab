"""A whole gateway on a real socket in front of a scripted router, for tests with HTTP clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, GatewaySpec, TokenizerSpec
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.app import Gateway
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer, TokenizerPool
from kvasir_platform.gateway.start import make_gateway, make_metrics


@dataclass
class Edge:
    """A running gateway."""

    gateway: Gateway
    router: ScriptedRouter
    metrics: Metrics
    host: str
    port: int


@cache
def _tokenizer() -> ModelTokenizer:
    """The tokenizer of the default model. Loading verifies the fast one, which takes most of a second."""
    return ModelTokenizer.from_folder(resolve_model(Deployment().model.source), TokenizerSpec())


def models_of(deployment: Deployment) -> ModelTable:
    """The models of a deployment of the default model, with one tokenizer for all tests of a process."""
    return ModelTable([EdgeModel.of(view, TokenizerPool(_tokenizer())) for view in deployment.views()])


class Listening(NamedTuple):
    """Where a gateway listens, and what it runs in."""

    host: str
    port: int
    serving: asyncio.Task[None]


@asynccontextmanager
async def listening(gateway: Gateway, listen: socket.socket | None = None) -> AsyncIterator[Listening]:
    """Serve until the context ends."""
    started: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(gateway.serve(listen, lambda host, port: started.set_result((host, port))))
    await asyncio.wait((started, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield Listening(*started.result(), task)
    finally:
        gateway.stop()
        await task


@asynccontextmanager
async def serving(
    spec: GatewaySpec | None = None, *, listen: socket.socket | None = None, **parts: object
) -> AsyncIterator[Edge]:
    """A gateway of the default model that serves until the context ends. `parts` are further fields of the
    deployment."""
    gateway_spec = GatewaySpec(port=0, drain_timeout_s=0.0) if spec is None else spec
    deployment = Deployment.model_validate({"gateway": gateway_spec, **parts})
    clock = MonotonicClock()
    router = ScriptedRouter(clock)
    metrics = make_metrics(deployment)
    gateway = make_gateway(deployment, router, clock, metrics, models_of(deployment))
    async with listening(gateway, listen) as (host, port, _):
        yield Edge(gateway, router, metrics, host, port)
