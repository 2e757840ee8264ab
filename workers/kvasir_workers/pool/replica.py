"""One engine replica as a Ray Serve replica.

Ray Serve places, health-checks and replaces replicas; no request passes through it. The replica runs
its own session server on Serve's event loop and tells the router of it through a membership record.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvasir.config.spec import Deployment
from kvasir.core.membership import Endpoint, MemberRecord
from kvasir.ports.clock import Clock
from kvasir_workers.pool.announcer import Announcer

log = logging.getLogger(__name__)


class Node(Protocol):
    """A running worker: an engine and its session server."""

    @property
    def endpoint(self) -> Endpoint:
        """Where routers reach it."""
        ...

    async def failed(self) -> str:
        """Return why the worker can serve no more, when that happens."""
        ...

    async def stop(self, reason: str, grace_s: float) -> None:
        """Let streams come to their end within `grace_s` seconds, then end."""
        ...


NodeFactory = Callable[[Deployment, str, str], Awaitable[Node]]


class PoolReplica:
    """The class that Ray Serve instantiates.

    `start_node(deployment, pool, token)` builds the worker; it is named by the composition root, so
    that this module knows no engine. `token` is the shared secret of sessions.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, start_node: NodeFactory, clock: Clock, deployment: str, pool: str, token: str
    ) -> None:
        spec = Deployment.model_validate_json(deployment)
        self._failure: str | None = None
        self._drain_s = spec.worker.drain_s
        self._node: Node | None = None
        node = await start_node(spec, pool, token)
        endpoint = node.endpoint
        record = MemberRecord(
            worker_id=endpoint.worker_id, address=endpoint.address, pool=pool, pid=os.getpid(), beat=0
        )
        self._announcer = Announcer(spec.name, record, clock)
        self._announcer.start()
        self._watch = asyncio.create_task(self._leave_on_failure(node))
        self._node = node

    async def _leave_on_failure(self, node: Node) -> None:
        # A replica whose engine is dead would fail three health checks before Serve replaced it;
        # leaving at once saves those seconds, and closes every session so that routers know too.
        self._failure = await node.failed()
        log.error("the engine failed, leaving so that a new replica takes over: %s", self._failure)
        os._exit(1)

    async def check_health(self) -> None:
        """Ray Serve's health check: the engine's own."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    async def __del__(self) -> None:  # Ray Serve awaits it on a planned stop
        if self._node is None:  # it is also called where the constructor failed
            return
        self._watch.cancel()
        await self._announcer.withdraw()
        await self._node.stop("the replica is being stopped", self._drain_s)
