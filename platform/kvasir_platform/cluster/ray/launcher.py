"""The Launcher for one machine: a control process that owns Ray, and a router process.

Both are children of the supervisor; neither the supervisor nor the router is a Ray driver.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from functools import partial
from typing import Any

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import StartError
from kvasir_platform.cluster.local.launcher import LaunchSession, ReplicaStatus
from kvasir_platform.cluster.local.processes import Child, Children, ended
from kvasir_platform.cluster.ray.head import ray_environment
from kvasir_workers.pool.output_log import LOGS_VARIABLE

START_TIMEOUT_S = 120.0
STOP_MARGIN_S = 15.0


class RayLauncher:
    """See kvasir_platform.cluster.local.launcher.Launcher."""

    def __init__(self, deployment: Deployment, session: LaunchSession) -> None:
        token_file = deployment.worker.session_token_file
        if token_file is None:
            raise StartError("the deployment names no session_token_file; the supervisor makes one")
        self._deployment = deployment
        self._session = session
        self._common = [f"--deployment={session.spec_file}", f"--token-file={token_file}"]
        env = {**session.env, **ray_environment(secrets.token_hex(32)), LOGS_VARIABLE: str(session.logs)}
        self._children = Children(session.logs, env)
        self._control: Child | None = None
        self._events = _Events()

    async def start_cluster(self) -> None:
        self._control = await self._spawn(
            "control",
            "kvasir_platform.apps.control_app",
            f"--temp-dir={self._session.temp_dir}",
            f"--logs={self._session.logs}",
        )
        await self._wait_for("ray", self._control)

    async def start_pools(self) -> None:
        if self._control is None:
            raise StartError("start_pools before start_cluster")
        await self._wait_for("pools", self._control)

    async def pool_status(self) -> list[ReplicaStatus]:
        pools: list[dict[str, Any]] = self._events.newest.get("pools", {}).get("pools", [])
        return [replica for pool in pools for replica in _replicas(pool, str(self._session.logs))]

    async def start_router(self) -> str:
        ray = self._events.newest.get("ray", {})
        planner = self._events.newest.get("planner")
        router = await self._spawn(
            "router",
            "kvasir_platform.apps.router_app",
            f"--ray-address={ray.get('address', '')}",
            *([f"--planner={planner['address']}"] if planner else []),
        )
        listening = await self._wait_for("listening", router)
        return str(listening["address"])

    async def wait_failed(self) -> StartError:
        ended = asyncio.create_task(self._children.wait_failed())
        saying = asyncio.create_task(self._events.wait("failed"))
        try:
            await asyncio.wait((ended, saying), return_when=asyncio.FIRST_COMPLETED)
            event = self._events.newest.get("failed")
            if event is None:
                return ended.result()
            return StartError(event["message"], log=event["log"])
        finally:
            ended.cancel()
            saying.cancel()
            await asyncio.gather(ended, saying, return_exceptions=True)

    async def stop(self) -> None:
        await self._children.stop(self._deployment.worker.drain_s + STOP_MARGIN_S)

    async def _spawn(self, name: str, module: str, *arguments: str) -> Child:
        argv = [sys.executable, "-m", module, *self._common, *arguments]
        take = partial(self._events.take, str(self._session.logs / f"{name}.log"))
        return await self._children.spawn(name, argv, on_line=take)

    async def _wait_for(self, event: str, child: Child) -> dict[str, Any]:
        """Wait for the newest event of that name. Raises StartError if the child fails, ends or takes too
        long."""
        waiting = asyncio.create_task(self._events.wait(event))
        exited = asyncio.create_task(child.wait())
        try:
            await asyncio.wait(
                (waiting, exited), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if waiting.done():
                return waiting.result()
            if exited.done():
                failed = self._events.newest.get("failed")
                raise StartError(failed["message"], log=str(child.log)) if failed else ended(child)
            raise StartError(
                f"{child.name} did not report {event!r} within {START_TIMEOUT_S:.0f} s", log=str(child.log)
            )
        finally:
            waiting.cancel()
            exited.cancel()


class _Events:
    """The newest event of each name that a child has printed."""

    def __init__(self) -> None:
        self.newest: dict[str, dict[str, Any]] = {}
        self._changed = asyncio.Event()

    def take(self, log: str, line: str) -> None:
        """Record the event on a line, with the path `log` of the log that has it; other lines are ignored."""
        if not line.startswith('{"event"'):
            return
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            return
        self.newest[str(event["event"])] = event | {"log": log}
        self._changed.set()

    async def wait(self, name: str) -> dict[str, Any]:
        """Return the newest event of that name, at once if there is one."""
        while name not in self.newest:
            self._changed.clear()
            await self._changed.wait()
        return self.newest[name]


def _replicas(pool: dict[str, Any], logs: str) -> list[ReplicaStatus]:
    """Spread a pool's status, as the control process reports it, over the requested replicas. `logs` is the
    folder of logs."""
    name, running = str(pool["pool"]), int(pool["running"])
    failed, log = bool(pool["failed"]), str(pool["log"]) or logs
    rows = []
    for number in range(max(int(pool["wanted"]), running)):
        if number < running:
            rows.append(ReplicaStatus(name, f"{name}-{number}", "ready", str(pool["state"]), log))
        elif failed:
            rows.append(
                ReplicaStatus(
                    name,
                    f"{name}-{number}",
                    "failed",
                    str(pool["message"]),
                    log,
                    str(pool["remedy"]),
                    is_root=bool(pool["permanent"]),
                )
            )
        else:
            rows.append(ReplicaStatus(name, f"{name}-{number}", "starting", str(pool["message"]), log))
    return rows
