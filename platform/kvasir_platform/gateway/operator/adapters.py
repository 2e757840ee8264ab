"""Endpoints that load and unload LoRA adapters while the deployment runs, in vLLM's format."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from kvasir.ports.router import AdapterPort
from kvasir_platform.gateway.http.exchange import Exchange, LaterAnswers
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
        self._later = LaterAnswers("adapter-page")

    def serve(self, exchange: Exchange) -> None:
        """Respond later. Raise RequestError for an invalid body."""
        if exchange.request.path == LOAD:
            load = decode_load_adapter(exchange.request.body)
            work = self._load(load.model, load.lora_name, load.lora_path, load.replicas or 0)
        else:
            work = self._unload(decode_unload_adapter(exchange.request.body).lora_name)
        self._later.answer(exchange, work)

    async def _load(self, model: str | None, name: str, source: str, replicas: int) -> bytes:
        workers = await self._adapters.load(model, name, source, replicas)
        log.info("an operator loaded adapter %s from %s on %s", name, source, ", ".join(workers))
        return _encoded("added", name, workers)

    async def _unload(self, name: str) -> bytes:
        workers = await self._adapters.unload(name)
        log.info("an operator unloaded adapter %s from %s", name, ", ".join(workers))
        return _encoded("removed", name, workers)


def _encoded(done: str, name: str, workers: Iterable[str]) -> bytes:
    message = f"Success: LoRA adapter '{name}' {done} successfully."
    return msgspec.json.encode(AdapterResult(message, name, list(workers)))
