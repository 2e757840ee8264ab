"""The record of vLLM's prefix cache, kept exact from the engine's start to its end."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.native import root_hash
from kvasir.ports.clock import Clock
from kvasir_workers.engines.vllm.events.kv_events import KvEvents
from kvasir_workers.engines.vllm.events.kv_recovery import CacheControl, RecoveryPolicy, make_exact
from kvasir_workers.engines.vllm.setup.arguments import EVENT_BACKLOG, EventEndpoints
from kvasir_workers.server.holdings import Holdings

_POLICY = RecoveryPolicy()
_ENDPOINT_BYTES = len("ipc://") + 107
"""The scheme, and the maximum length of a Unix socket's address."""


class CacheRecord:
    """The `holdings` of one engine, updated from `open` to `close`.

    `backlog` bounds the messages in flight.
    """

    def __init__(
        self, deployment: Deployment, pool: PoolSpec, clock: Clock, *, backlog: int = EVENT_BACKLOG
    ) -> None:
        self._ranks = pool.engine.data_parallel_size
        self._clock = clock
        self._backlog = backlog
        self._directory: Path | None = None
        self._places_salts = bool(deployment.tenancy.shared_prefixes)
        self._events: KvEvents | None = None
        self.holdings = Holdings(self._ranks, partial(root_hash, deployment.model.name))

    def open(self, epoch: int, *, media: bool = False) -> EventEndpoints:
        """Listen, before the engine starts; return the endpoints to publish to. `media`: prompts may have
        some. Raise ConfigError if the sockets cannot be created."""
        self._directory = Path(tempfile.mkdtemp(prefix="kvasir-kv-"))
        endpoints = EventEndpoints(self._directory)
        if max(map(len, endpoints.of_rank(self._ranks))) > _ENDPOINT_BYTES:
            self.close()
            raise ConfigError(f"TMPDIR: {tempfile.gettempdir()} is too long for a socket's path; shorten it")
        self.holdings.begin(epoch, incomplete="the engine starts")
        self._events = KvEvents(
            self.holdings,
            endpoints,
            self._ranks,
            backlog=self._backlog,
            marks=media or self._places_salts,
        )
        return endpoints

    def flush(self) -> None:
        """Publish the events that have arrived of the step about to be delivered; never waits for more."""
        if self._events is not None:
            self._events.drain()
        self.holdings.flush()

    async def make_exact(self, control: CacheControl) -> None:
        """Return once the record matches the engine's cache."""
        await make_exact(self._listening, control, self._clock, _POLICY)

    async def keep_exact(self, control: CacheControl) -> None:
        """Restore the record whenever events were lost."""
        while True:
            await self._listening.lost.wait()
            await self.make_exact(control)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        events, self._events = self._events, None
        if events is not None:
            events.close()
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def _listening(self) -> KvEvents:
        if self._events is None:
            raise RuntimeError("the record has not been opened")
        return self._events
