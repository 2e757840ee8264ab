"""Orders of routers to load and unload adapters, and the reports of what the worker holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvasir.core.errors import KvasirError, RequestError
from kvasir.core.messages import AdapterAnswer, AdapterOrder, AdaptersHeld, LoadAdapter, WorkerMessage
from kvasir_workers.adapters.host import AdapterHost
from kvasir_workers.server.session import RouterSession

log = logging.getLogger(__name__)

_MOST_ORDERS = 256


class AdapterOrders:
    """Carries out orders on `host`; None refuses all of them. `push` sends to one session, `tell` to all."""

    def __init__(
        self,
        host: AdapterHost | None,
        push: Callable[[RouterSession, WorkerMessage], None],
        tell: Callable[[WorkerMessage], None],
    ) -> None:
        self._host = host
        self._push = push
        self._running: set[asyncio.Task[None]] = set()
        if host is not None:
            host.on_change = lambda: tell(AdaptersHeld(host.held))

    def greet(self, session: RouterSession) -> None:
        """Report what is held to a new session."""
        if self._host is not None:
            self._push(session, AdaptersHeld(self._host.held))

    def take(self, session: RouterSession, order: AdapterOrder) -> None:
        """Carry out an order, and answer it. It continues if its session ends."""
        if len(self._running) >= _MOST_ORDERS:
            busy = AdapterAnswer(order.number, "no_capacity", "The worker has too many orders.", 503)
            self._push(session, busy)
            return
        task = asyncio.create_task(self._answer(session, order), name=f"adapter-{order.name}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Abandon all orders."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._host is not None:
            await self._host.close()

    async def _answer(self, session: RouterSession, order: AdapterOrder) -> None:
        try:
            await self._carry_out(order)
            answer = AdapterAnswer(order.number)
        except KvasirError as error:
            status = error.status if isinstance(error, RequestError) else 502
            answer = AdapterAnswer(order.number, error.code, error.message, status)
        except Exception as error:
            # An order that fails for an unknown reason must still be answered.
            log.exception("adapter %s failed", order.name)
            answer = AdapterAnswer(
                order.number, "adapter_load_failed", f"{type(error).__name__}: {error}", 502
            )
        self._push(session, answer)

    async def _carry_out(self, order: AdapterOrder) -> None:
        if self._host is None:
            raise RequestError(
                "Adapters cannot be loaded at run time: set lora_loading.allow in kvasir.yaml.",
                status=403,
                code="adapter_loading_disabled",
            )
        if isinstance(order, LoadAdapter):
            await self._host.load(order)
        else:
            await self._host.unload(order.name)
