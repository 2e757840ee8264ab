"""Loads and unloads the adapters of one model on its workers, and restores them on workers that join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.config.spec.deployment import LoraLoadingSpec
from kvasir.core.adapters import HeldAdapter, check_name, check_source
from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.messages import (
    AdapterAnswer,
    AdapterReport,
    AdaptersHeld,
    LoadAdapter,
    RouterMessage,
    UnloadAdapter,
)
from kvasir.ports.clock import Clock
from kvasir.ports.router import ServedAdapter
from kvasir_router.adapters.errors import (
    in_use,
    not_loaded,
    partly_loaded,
    too_late,
    unknown_model,
)
from kvasir_router.adapters.placement import AdapterWorker, choose, missing_copies, wanted

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Time after the last change before missing copies are loaded: an order in progress is not repeated."""
RETRY_S = 30.0
"""Time before a worker that failed to load a copy is asked again."""


@dataclass(frozen=True, slots=True)
class AdapterWorkers:
    """The shell's side. `list` returns the model's workers without their adapters, `send` sends to one or
    raises UpstreamError, `changed` is called with the keys that a worker holds, and `spawn` runs a task."""

    list: Callable[[], Iterable[AdapterWorker]]
    send: Callable[[str, RouterMessage], None]
    changed: Callable[[str, frozenset[str]], None]
    spawn: Callable[[Coroutine[Any, Any, None], str], object]


class AdapterControl:
    """`kvasir.ports.router.AdapterPort` for one model, whose pools are `pools`. `taken` are all other names
    that clients may use. `serves` says whether requests with an adapter's key can be served, and `version`
    changes whenever its results may. Call everything on one event loop, after `attach`."""

    def __init__(
        self,
        model: str,
        spec: LoraLoadingSpec,
        pools: Iterable[str],
        clock: Clock,
        *,
        taken: Iterable[str],
        serves: Callable[[str], bool],
        version: Callable[[], int],
    ) -> None:
        self._model = model
        self._spec = spec
        self._pools = tuple(pools)
        self._clock = clock
        self._taken = frozenset(taken)
        self._serves = serves
        self._version = version
        self._workers: AdapterWorkers | None = None
        self._held: dict[str, tuple[HeldAdapter, ...]] = {}
        self._waiting: dict[tuple[str, int], asyncio.Future[AdapterAnswer]] = {}
        self._last = 0
        self._busy: set[str] = set()
        self._failed_s: dict[tuple[str, str], float] = {}
        self._restoring = False
        self._changes = 0
        self._served: dict[str, ServedAdapter] = {}
        self._served_at = (-1, -1)

    def attach(self, workers: AdapterWorkers) -> None:
        """Set the way to the workers, once."""
        self._workers = workers

    # -- AdapterPort -----------------------------------------------------------------------------

    def served(self) -> Mapping[str, ServedAdapter]:
        """See AdapterCatalog."""
        at = (self._changes, self._version())
        if at != self._served_at:
            self._served_at = at
            self._served = {
                name: ServedAdapter(name, self._model, key)
                for name, key in self._offered()
                if self._serves(key)
            }
        return self._served

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """See AdapterPort. The first worker loads alone: what is wrong with the adapter shows there, before
        another one has it. If a further one fails, those that hold it keep it."""
        if model not in (None, self._model):
            raise unknown_model(model, {self._model: self})
        self._check(name, source)
        self._busy.add(name)
        try:
            first, *others = choose(self._all(), self._pools, replicas, self._spec.max_adapters)
            await self._order(first, LoadAdapter(self._next(), name, source, replicas))
            held = next((each for each in self._held.get(first, ()) if each.name == name), None)
            digest = "" if held is None else held.digest
            orders = [
                self._order(worker_id, LoadAdapter(self._next(), name, source, replicas, digest))
                for worker_id in others
            ]
            results = await asyncio.gather(*orders, return_exceptions=True)
        finally:
            self._busy.discard(name)
        failures = {}
        for worker_id, result in zip(others, results, strict=True):
            if isinstance(result, KvasirError):
                failures[worker_id] = result.message
            elif isinstance(result, BaseException):
                raise result
        if failures:
            raise partly_loaded(name, 1 + len(others) - len(failures), failures, RETRY_S)
        return (first, *others)

    async def unload(self, name: str) -> tuple[str, ...]:
        """See AdapterPort. Nothing is unloaded while a worker that holds it cannot be reached: it would serve
        the adapter again when it is back."""
        workers = [each for each in self._all() if any(held.name == name for held in each.held)]
        if not workers:
            raise not_loaded(name)
        if away := [each.worker_id for each in workers if not each.connected]:
            raise CapacityError(
                f"{', '.join(away)} holds the adapter {name!r} and cannot be reached; unload it when the "
                "worker is back or has left (`kvasir get workers`).",
                code="adapter_unreachable",
            )
        holders = [each.worker_id for each in workers]
        self._busy.add(name)
        try:
            orders = [self._order(worker_id, UnloadAdapter(self._next(), name)) for worker_id in holders]
            results = await asyncio.gather(*orders, return_exceptions=True)
        finally:
            self._busy.discard(name)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(holders)

    def uses(self, name: str) -> bool:
        """Whether any worker holds an adapter of that name, or is asked to."""
        held = any(each.name == name for adapters in self._held.values() for each in adapters)
        return held or name in self._busy

    def check_unused(self, name: str) -> None:
        """Raise RequestError (adapter_exists) if clients use the name already."""
        if self.uses(name) or name in self._taken:
            raise in_use(name)

    # -- the shell's side ------------------------------------------------------------------------

    def held(self, worker_id: str) -> tuple[HeldAdapter, ...]:
        """Return what the worker reported last."""
        return self._held.get(worker_id, ())

    def heard(self, worker_id: str, report: AdapterReport) -> None:
        """Handle a report of a worker, accepted or not."""
        if isinstance(report, AdapterAnswer):
            waiting = self._waiting.get((worker_id, report.number))
            if waiting is not None and not waiting.done():
                waiting.set_result(report)
            return
        self._take(worker_id, report)

    def joined(self, worker_id: str) -> None:
        """A worker was accepted."""
        self._tell(worker_id)
        self._restore_soon()

    def left(self, worker_id: str) -> None:
        """The session of a worker is over."""
        if self._held.pop(worker_id, None):
            self._changes += 1
        for (waiter, _), waiting in self._waiting.items():
            if waiter == worker_id and not waiting.done():
                waiting.set_exception(
                    UpstreamError(f"worker {worker_id} was lost before it answered", code="worker_lost")
                )

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, worker_id: str, report: AdaptersHeld) -> None:
        if self._held.get(worker_id, ()) != report.adapters:
            self._held[worker_id] = report.adapters
            self._changes += 1
            self._tell(worker_id)
            self._restore_soon()

    def _tell(self, worker_id: str) -> None:
        if self._workers is not None:
            self._workers.changed(worker_id, frozenset(each.key for each in self.held(worker_id)))

    def _all(self) -> list[AdapterWorker]:
        """Return the workers with what they hold."""
        known = () if self._workers is None else self._workers.list()
        return [
            AdapterWorker(each.worker_id, each.pool, each.ready, each.connected, self.held(each.worker_id))
            for each in known
        ]

    def _offered(self) -> Iterable[tuple[str, str]]:
        return [(name, held.key) for name, held in wanted(self._all()).items()]

    def _check(self, name: str, source: str) -> None:
        check_name(name)
        check_source(self._spec.allow, source)
        self.check_unused(name)

    def _next(self) -> int:
        self._last += 1
        return self._last

    async def _order(self, worker_id: str, order: LoadAdapter | UnloadAdapter) -> None:
        """Send an order and wait for its result. Raise KvasirError."""
        if self._workers is None:
            raise RuntimeError("the control of adapters is not attached")
        key = worker_id, order.number
        waiting: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        timer = asyncio.ensure_future(self._clock.sleep(self._spec.timeout_s))
        try:
            self._workers.send(worker_id, order)
            await asyncio.wait((waiting, timer), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise too_late(worker_id, order, self._spec.timeout_s)
            answer = waiting.result()
        finally:
            del self._waiting[key]
            timer.cancel()
        if answer.code:
            raise RequestError(answer.message, status=answer.status or 502, code=answer.code)

    # -- workers that join -----------------------------------------------------------------------

    def _restore_soon(self) -> None:
        if not self._restoring and self._workers is not None:
            self._restoring = True
            self._workers.spawn(self._restore(), f"adapters-{self._model}")

    async def _restore(self) -> None:
        """Load what is missing, until nothing is. One task at a time."""
        try:
            while True:
                changes = self._changes
                await self._clock.sleep(SETTLE_S)
                if changes != self._changes:
                    continue
                missing = missing_copies(self._all(), self._pools, self._spec.max_adapters, self._busy)
                due = [(worker_id, held) for worker_id, held in missing if self._is_due(worker_id, held)]
                await asyncio.gather(*(self._restore_one(worker_id, held) for worker_id, held in due))
                if not missing and not self._busy:
                    return
        finally:
            self._restoring = False

    def _is_due(self, worker_id: str, held: HeldAdapter) -> bool:
        return self._clock.now() >= self._failed_s.get((worker_id, held.key), 0.0)

    async def _restore_one(self, worker_id: str, held: HeldAdapter) -> None:
        self._failed_s = {key: due for key, due in self._failed_s.items() if due > self._clock.now()}
        order = LoadAdapter(self._next(), held.name, held.source, held.replicas, held.digest)
        try:
            await self._order(worker_id, order)
        except KvasirError as error:
            self._failed_s[worker_id, held.key] = self._clock.now() + RETRY_S
            log.warning("adapter %s is missing on %s: %s", held.name, worker_id, error.message)
        else:
            log.info("adapter %s was loaded on %s", held.name, worker_id)
