"""A gateway in front of a capable model, as a process: `python -m tests.kit.frameworks.capable_server` prints
its address and serves until it is ended."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from tests.kit.frameworks.capable_model import CapableModel
from tests.kit.gateway.http_edge import listening, models_of
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, GatewaySpec
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.start import make_gateway, make_metrics


async def serve() -> None:
    """Serve until the task is cancelled."""
    deployment = Deployment(gateway=GatewaySpec(port=0))
    clock = MonotonicClock()
    (model,) = models_of(deployment).models
    capable = replace(model, capabilities=replace(model.capabilities, tools=True))
    router = ScriptedRouter(clock, CapableModel(model.tokenizer.decode))
    metrics = make_metrics(deployment)
    gateway = make_gateway(deployment, router, clock, metrics, ModelTable([capable]))
    async with listening(gateway) as (host, port, serving):
        sys.stdout.write(f"http://{host}:{port}\n")
        sys.stdout.flush()
        await serving


if __name__ == "__main__":
    asyncio.run(serve())
