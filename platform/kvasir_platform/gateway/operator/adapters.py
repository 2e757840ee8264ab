"""Endpoints that load and unload LoRA adapters while the deployment runs, in vLLM's format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.ports.router import AdapterPort
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import AdapterResult
from kvasir_platform.gateway.openai.schema.decode import decode_load_adapter, decode_unload_adapter

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

log = logging.getLogger(__name__)


class AdapterPages:
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter. The response is sent when workers hold the
    adapter, or none does any more. A client that leaves does not stop the order."""

    def __init__(self, adapters: AdapterPort) -> None:
        self._adapters = adapters
        self._running: set[asyncio.Task[None]] = set()

    def serve(self, exchange: Exchange) -> None:
        """Respond later. Raise RequestError for an invalid body."""
        if exchange.request.path == LOAD:
            load = decode_load_adapter(exchange.request.body)
            work = self._load(load.model, load.lora_name, load.lora_path, load.replicas or 0)
        else:
            work = self._unload(decode_unload_adapter(exchange.request.body).lora_name)
        task = asyncio.get_running_loop().create_task(_respond(exchange, work), name="adapter-page")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _load(self, model: str | None, name: str, source: str, replicas: int) -> AdapterResult:
        workers = await self._adapters.load(model, name, source, replicas)
        log.info("an operator loaded adapter %s from %s on %s", name, source, ", ".join(workers))
        return AdapterResult(f"Success: LoRA adapter '{name}' added successfully.", name, list(workers))

    async def _unload(self, name: str) -> AdapterResult:
        workers = await self._adapters.unload(name)
        log.info("an operator unloaded adapter %s from %s", name, ", ".join(workers))
        return AdapterResult(f"Success: LoRA adapter '{name}' removed successfully.", name, list(workers))


async def _respond(exchange: Exchange, work: Coroutine[Any, Any, AdapterResult]) -> None:
    try:
        result = await work
    except KvasirError as error:
        exchange.fail(error)
    # As in the gateway, an internal error must still produce a response.
    except Exception as error:
        log.exception("an order for an adapter failed")
        exchange.fail(error)
    else:
        exchange.respond(200, msgspec.json.encode(result))
