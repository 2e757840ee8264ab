"""The further nodes of an engine as Ray actors, with the lifetime of the replica that they belong to.

An engine that lost a node cannot run, and its ranks do not notice: they wait for each other forever. Ray
does: it ends an actor when the process that created it ends, and reports to that process when the actor ends.
So the replica, which is the first node, creates the others, and leaves when one of them is lost; the replica
that Ray Serve starts in its place creates its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import EngineStartError
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.pool.log_handlers import keep_open
from kvasir_workers.pool.output_log import OutputLog
from kvasir_workers.pool.sigterm import on_sigterm

log = logging.getLogger(__name__)

STARTED_S = 120.0
"""How long Ray may take to start a process for which resources are reserved."""

FollowerFactory = Callable[[Deployment, str, int, NodePlace], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How an engine gets its nodes, named by the composition root. `follow(deployment, pool, rank, leader)`
    runs the ranks of a node and returns why they ended; `lead(deployment)` returns the place of the first
    node, in the calling process."""

    follow: FollowerFactory
    lead: Callable[[Deployment], NodePlace]


class EngineFollower:
    """The class that Ray instantiates, once for each node but the first."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, follow: FollowerFactory, deployment: str, pool: str, rank: int
    ) -> None:
        keep_open()
        self._follow = follow
        self._deployment = Deployment.model_validate_json(deployment)
        self._pool = pool
        self._rank = rank
        self._asked = asyncio.Event()
        self._output = OutputLog.keep(pool)
        loop = asyncio.get_running_loop()

        def asked() -> None:
            loop.call_soon_threadsafe(self._asked.set)

        if not on_sigterm(asked):
            log.warning("SIGTERM ends this node at once: this version of Ray leaves no way to drain on it")

    async def started(self) -> None:
        """Return, which shows that this process has started."""

    async def run(self, leader: NodePlace) -> str:
        """Run this node's ranks; return why they ended. Raise what the factory raises."""
        return await self._follow(self._deployment, self._pool, self._rank, leader)

    async def asked_to_end(self) -> None:
        """Return when this process receives SIGTERM; the first node drains, since it has the streams."""
        await self._asked.wait()


class Followers:
    """All nodes of one engine but the first, whose process this is. They end with this process."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._running: list[asyncio.Task[str]] = []

    @classmethod
    async def place(
        cls, plan: NodePlan, deployment: Deployment, pool: str, *, patience_s: float = STARTED_S
    ) -> Followers:
        """Start their processes, each in the bundle of its rank: Ray Serve has reserved all bundles with the
        replica. Raise RuntimeError if they are not up within `patience_s` seconds, or cannot start."""
        room = await asyncio.to_thread(_reserved)
        kind = ray.remote(EngineFollower)
        spec = deployment.model_dump_json()
        followers = cls(
            [
                kind.options(**options).remote(plan.follow, spec, pool, rank)
                for rank, options in enumerate(room, start=1)
            ]
        )
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.gather(*(_answer(actor.started.remote()) for actor in followers._actors))
        except TimeoutError:
            followers.end()
            raise RuntimeError(
                f"the further nodes of an engine of {pool} did not start within {patience_s:.0f} s; see "
                "Ray's logs in their pods"
            ) from None
        except ray.exceptions.RayError as error:
            followers.end()
            raise RuntimeError(f"a further node of {pool} did not start: {error}") from error
        return followers

    def start(self, leader: NodePlace) -> None:
        """Start their ranks, which wait for the leader's."""
        self._running = [asyncio.create_task(_answer(actor.run.remote(leader))) for actor in self._actors]

    async def lost(self) -> str:
        """Wait for the end of a node, and return why the engine cannot run."""
        ended, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        (first, *_) = ended
        error = first.exception()
        return first.result() if error is None else f"a further node of the engine was lost: {_plain(error)}"

    def start_error(self) -> EngineStartError | None:
        """Return the error with which a node did not start, None if no node reported one."""
        for each in self._running:
            error = each.exception() if each.done() and not each.cancelled() else None
            if isinstance(cause := _plain(error), EngineStartError):
                return cause
        return None

    async def asked_to_end(self) -> None:
        """Return when the process of one of them receives SIGTERM."""
        asked = [asyncio.create_task(_answer(actor.asked_to_end.remote())) for actor in self._actors]
        try:
            while asked:
                ended, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                if any(each.exception() is None for each in ended):
                    return
                # The loss of a node is reported by `lost`.
                asked = list(waiting)
            await asyncio.get_running_loop().create_future()
        finally:
            for each in asked:
                each.cancel()

    def end(self) -> None:
        """End their processes at once. Idempotent."""
        for running in self._running:
            running.cancel()
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)


def _plain(error: BaseException | None) -> BaseException | None:
    """Return the exception that an actor raised, without the traceback with which Ray wraps it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _reserved() -> list[dict[str, Any]]:
    """Return the options of an actor that takes the whole bundle, for each node but the first. Blocks."""
    group: Any = get_current_placement_group()
    made = []
    for rank, bundle in enumerate(group.bundle_specs[1:], start=1):
        rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        made.append(
            {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "resources": rest,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            }
        )
    return made


async def _answer(reference: Any) -> Any:
    return await reference
