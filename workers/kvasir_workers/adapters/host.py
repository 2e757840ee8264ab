"""The adapters that a worker has loaded at run time, from the order to load one to its removal.

Routers route by what is reported here, so an adapter is reported when it can serve, and is no longer offered
from the moment an order to unload it arrives. It is removed once no leg has used it for `QUIET_S`: between
the prefill leg of a running request and its decode leg, a worker may be idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from kvasir.config.spec.deployment import LoraLoadingSpec
from kvasir.core.adapters import HeldAdapter, check_name
from kvasir.core.errors import RequestError
from kvasir.core.messages import LoadAdapter
from kvasir.ports.adapters import AdapterEngine
from kvasir.ports.clock import Clock
from kvasir_workers.adapters.files import AdapterFiles

log = logging.getLogger(__name__)

QUIET_S = 1.0
_POLL_S = 0.1


class AdapterFileStore(Protocol):
    """Where the files of adapters come from; see AdapterStore."""

    async def open(self, source: str) -> AdapterFiles: ...

    async def discard(self, files: AdapterFiles) -> None: ...

    async def close(self) -> None: ...


class AdapterHost:
    """Adapters of `engine`, with their files from `store`. `taken` are the names of the model and of the
    adapters in the spec. `on_change` is called whenever `held` changes."""

    def __init__(
        self,
        engine: AdapterEngine,
        store: AdapterFileStore,
        spec: LoraLoadingSpec,
        clock: Clock,
        *,
        taken: Iterable[str] = (),
    ) -> None:
        self._engine = engine
        self._store = store
        self._spec = spec
        self._clock = clock
        self._taken = frozenset(taken)
        self._held: dict[str, HeldAdapter] = {}
        self._files: dict[str, AdapterFiles] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        # An engine loads one adapter at a time.
        self._turn = asyncio.Lock()
        self.on_change: Callable[[], None] = _nothing

    @property
    def held(self) -> tuple[HeldAdapter, ...]:
        """All adapters, by name."""
        return tuple(self._held[name] for name in sorted(self._held))

    async def load(self, order: LoadAdapter) -> None:
        """Load an adapter; one that is held from the same source is kept. Raise RequestError."""
        async with self._turn:
            if self._is_held(order):
                return
            self._check(order.name)
            files = await self._store.open(order.source)
            try:
                held = _held(order, files)
                await self._engine.add_adapter(held.key, files.folder)
            except BaseException:
                await self._store.discard(files)
                raise
            self._files[order.name] = files
            self._set(held)
            log.info("loaded adapter %s from %s", held.key, held.source)

    async def unload(self, name: str) -> None:
        """Remove an adapter when the legs that use it have ended; does nothing if it is not held. A cancelled
        call does not end the removal."""
        if name not in self._removals:
            held = self._held.get(name)
            if held is None:
                return
            self._set(replace(held, retiring=True))
            self._removals[name] = asyncio.create_task(self._remove(held), name=f"unload-{name}")
        await asyncio.shield(self._removals[name])

    async def close(self) -> None:
        """Abandon removals and delete downloads. Idempotent."""
        removals, self._removals = list(self._removals.values()), {}
        for task in removals:
            task.cancel()
        await asyncio.gather(*removals, return_exceptions=True)
        await self._store.close()

    def _is_held(self, order: LoadAdapter) -> bool:
        held = self._held.get(order.name)
        if held is None:
            return False
        if held.retiring:
            raise _exists(f"{order.name!r} is being unloaded; load it again when that is done")
        if held.source != order.source or order.digest not in ("", held.digest):
            raise _exists(f"{order.name!r} is loaded from {held.source}; unload it first, or choose a name")
        if held.replicas != order.replicas:
            self._set(replace(held, replicas=order.replicas))
        return True

    def _check(self, name: str) -> None:
        check_name(name)
        if name in self._taken:
            raise _exists(f"{name!r} is a model or an adapter of kvasir.yaml; choose another name")
        if len(self._held) >= self._spec.max_adapters:
            raise RequestError(
                f"The worker holds {len(self._held)} adapters, the most that lora_loading.max_adapters in "
                "kvasir.yaml allows; unload one first.",
                status=409,
                code="adapter_limit",
            )

    async def _remove(self, held: HeldAdapter) -> None:
        quiet_s = 0.0
        while quiet_s < QUIET_S:
            await self._clock.sleep(_POLL_S)
            quiet_s = 0.0 if self._engine.adapter_legs(held.key) else quiet_s + _POLL_S
        async with self._turn:
            await self._engine.remove_adapter(held.key)
            del self._held[held.name]
            del self._removals[held.name]
            await self._store.discard(self._files.pop(held.name))
        log.info("unloaded adapter %s", held.key)
        self.on_change()

    def _set(self, held: HeldAdapter) -> None:
        self._held[held.name] = held
        self.on_change()


def _held(order: LoadAdapter, files: AdapterFiles) -> HeldAdapter:
    """Return the adapter as it is reported. Raise RequestError if the files are not the expected ones."""
    if order.digest not in ("", files.digest):
        raise RequestError(
            f"The files at {order.source} are not those that other workers loaded as {order.name!r}; unload "
            "the adapter and load it again.",
            status=502,
            code="adapter_load_failed",
        )
    return HeldAdapter(order.name, order.source, order.replicas, files.digest, files.rank, files.nbytes)


def _exists(message: str) -> RequestError:
    return RequestError(f"The name {message}.", status=409, code="adapter_exists", param="lora_name")


def _nothing() -> None:
    """Ignores the change."""
