"""One engine replica as a Ray Serve replica.

Ray Serve places, health-checks and replaces replicas; no request passes through it, so that a replica full of
streams appears idle to it. The replica runs its own session server on Serve's event loop, announces it to
routers through a membership record, and drains by itself on every planned end.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from ray import serve
from ray.serve.exceptions import RayServeException

from kvasir.config.spec.deployment import Deployment
from kvasir.core.identity import WorkerIdentity
from kvasir.core.membership import Endpoint, MemberRecord
from kvasir.ports.clock import Clock
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.pool.announcer import Announcer
from kvasir_workers.pool.failures import failure_of, forget_failure, raise_again, record_failure
from kvasir_workers.pool.fence import claim_fence, fence_name
from kvasir_workers.pool.followers import Followers, NodePlan
from kvasir_workers.pool.log_handlers import keep_open
from kvasir_workers.pool.output_log import OWN_NAME, OutputLog
from kvasir_workers.pool.sigterm import on_sigterm

log = logging.getLogger(__name__)


class Node(Protocol):
    """A running worker: an engine and its session server."""

    @property
    def endpoint(self) -> Endpoint:
        """The address at which routers reach it."""
        ...

    @property
    def identity(self) -> WorkerIdentity:
        """The identity it sends to routers."""
        ...

    def stuck(self) -> str | None:
        """Why its engine is considered hung; None otherwise."""
        ...

    async def failed(self) -> str:
        """Wait until the worker cannot serve, and return why."""
        ...

    async def stop(self, reason: str, grace_s: float) -> None:
        """Let streams end within `grace_s` seconds, then stop."""
        ...


NodeFactory = Callable[[Deployment, str, str, NodePlace | None], Awaitable[Node]]


class PoolReplica:
    """The class that Ray Serve instantiates.

    `start_node(deployment, pool, token, place)` builds the worker; it is named by the composition root, so
    that this module imports no engine. `token` is the shared secret of sessions. An engine of several nodes
    gets them by the plan `nodes`, and its worker is the one at `place`. The constructor raises if the worker
    does not fit the running ones (kvasir_workers.pool.fence), or does not start; the reason is recorded
    (kvasir_workers.pool.failures).
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        start_node: NodeFactory,
        clock: Clock,
        deployment: str,
        pool: str,
        token: str,
        *,
        nodes: NodePlan | None = None,
    ) -> None:
        keep_open()
        spec = Deployment.model_validate_json(deployment)
        self._failure: str | None = None
        self._drain_s = spec.worker.drain_s
        self._node: Node | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._followers: Followers | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._output = OutputLog.keep(pool)
        await asyncio.to_thread(raise_again, spec.name, pool)
        try:
            node = await self._started(start_node, spec, pool, token, nodes)
        except Exception as error:
            log_file = "" if self._output is None else str(self._output.path)
            log.exception("this replica of %s does not start", pool)
            await asyncio.to_thread(record_failure, spec.name, pool, failure_of(error, log_file))
            raise
        await asyncio.to_thread(forget_failure, spec.name, pool)
        endpoint = node.endpoint
        record = MemberRecord(
            worker_id=endpoint.worker_id,
            address=endpoint.address,
            pool=pool,
            pid=os.getpid(),
            beat=0,
            replica=_own_name(),
        )
        # A change of `scaling` does not restart this replica, but applies to it too.
        self._announcer = Announcer(spec.name, record, clock, self._leave_when_asked)
        self._announcer.start()

        def state_name() -> None:
            log.info("%s %s, at %s", OWN_NAME, endpoint.worker_id, endpoint.address)

        state_name()
        if self._output is not None:
            # `kvasir logs WORKER` finds the log by this, also when its beginning is no longer kept.
            self._output.emptied = state_name
        self._node = node
        self._watches.append(asyncio.create_task(self._leave_on_failure(node.failed())))
        if self._followers is not None:
            self._watches.append(asyncio.create_task(self._leave_on_failure(self._followers.lost())))
            self._watches.append(asyncio.create_task(self._leave_with(self._followers)))
        loop = asyncio.get_running_loop()

        def asked() -> None:
            loop.call_soon_threadsafe(self._leave_on_sigterm)

        if not on_sigterm(asked):
            log.warning("SIGTERM ends this replica at once: this version of Ray leaves no way to drain on it")

    async def _started(
        self, start_node: NodeFactory, spec: Deployment, pool: str, token: str, nodes: NodePlan | None
    ) -> Node:
        """Start the worker with all nodes of its engine. Raise what they raise, or if it does not fit."""
        if nodes is None or spec.pool(pool).engine.nodes == 1:
            node = await start_node(spec, pool, token, None)
        else:
            self._followers = await Followers.place(nodes, spec, pool)
            place = nodes.lead(spec)
            self._followers.start(place)
            node = await _started_with(self._followers, start_node(spec, pool, token, place))
        if conflicts := await asyncio.to_thread(claim_fence, fence_name(spec, pool), node.identity):
            await node.stop("it does not fit the running replicas", 0.0)
            raise RuntimeError(
                f"a new replica of {pool} does not fit the running ones, which go on serving: "
                f"{'; '.join(conflicts)}. Restart the deployment to change this for all"
            )
        return node

    async def _leave_on_failure(self, failed: Coroutine[Any, Any, str]) -> None:
        # A replica with a dead engine would fail three health checks before Serve replaced it; leaving at
        # once saves those seconds, and closes every session so that routers learn of it.
        self._failure = await failed
        log.error("the engine failed; leaving, so that a new replica replaces this one: %s", self._failure)
        os._exit(1)

    async def _leave_with(self, followers: Followers) -> None:
        await followers.asked_to_end()
        log.info("a further node of the engine was asked to end: draining, then leaving")
        self._stop("a node of the engine is being stopped").add_done_callback(_leave)

    def _leave_on_sigterm(self) -> None:
        log.info("SIGTERM: draining, then leaving")
        self._stop("the replica's process was asked to stop").add_done_callback(_leave)

    def _leave_when_asked(self, reason: str) -> None:
        log.info("asked to leave (%s): draining, then leaving", reason)
        self._stop(reason).add_done_callback(_leave)

    async def check_health(self) -> None:
        """Ray Serve's health check: that of the engine. A replica that drains is healthy."""
        if self._output is not None:
            # Once a second, which bounds how much is written between two calls.
            self._output.trim()
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self._node is not None and self._stopping is None and (reason := self._node.stuck()) is not None:
            raise RuntimeError(reason)

    async def __del__(self) -> None:  # Ray Serve awaits it on a planned stop
        if self._node is not None:  # it is also called where the constructor failed
            await asyncio.shield(self._stop("the replica is being stopped"))

    def _stop(self, reason: str) -> asyncio.Task[None]:
        """Drain and end; a second call joins the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._drain(reason), name="drain")
        return self._stopping

    async def _drain(self, reason: str) -> None:
        if self._node is None:
            return
        for watch in self._watches:
            watch.cancel()
        await self._announcer.withdraw()
        await self._node.stop(reason, self._drain_s)
        if self._followers is not None:
            self._followers.end()


def _own_name() -> str:
    """Return Serve's name of this replica; "" outside of Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return ""


async def _started_with(followers: Followers, start: Awaitable[Node]) -> Node:
    """Start the worker, whose ranks and the followers' wait for each other. If a follower is lost meanwhile,
    raise its EngineStartError, or RuntimeError."""
    starting, losing = asyncio.ensure_future(start), asyncio.create_task(followers.lost())
    await asyncio.wait((starting, losing), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        raise followers.start_error() or RuntimeError(losing.result())
    losing.cancel()
    return starting.result()


def _leave(drained: asyncio.Task[None]) -> None:
    if not drained.cancelled() and (error := drained.exception()) is not None:
        log.error("the drain failed; leaving: %r", error)
    # Not through Ray's exit, which would wait for Serve's own tasks.
    os._exit(0)
