"""A Launcher of cheap processes: the behaviour of `kvasir up` around a deployment, without Ray or an engine.

Each replica is a sleeping process, optionally with a shared-memory file as engines leave them and with a
daemonised child. The gateway is a small HTTP or HTTPS server that reports itself ready. Everything can be
configured to fail, hang or ignore termination.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import StartError
from kvasir_platform.cluster.local.launcher import LaunchSession, ReplicaStatus
from kvasir_platform.cluster.local.processes import Child, Children, ended

_REPLICA = """
import multiprocessing.shared_memory, os, signal, subprocess, sys, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if {shared_memory}:
    from multiprocessing import resource_tracker, shared_memory
    block = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(block._name, "shared_memory")
    print("shared memory", block.name, flush=True)
if {orphan}:
    subprocess.Popen(["setsid", "-f", "sleep", "600"], start_new_session=True)
if {fails}:
    print("cannot load the model: not enough marbles", flush=True)
    sys.exit(3)
if not {hangs}:
    print("ready", flush=True)
time.sleep(600)
"""

_GATEWAY = """
import http.server, json, ssl
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        worker = {"worker_id": "w-1", "address": "mem", "pool": "decode", "state": "ready",
                  "reason": "", "in_flight": 2, "load": {"running": 2, "waiting": 0, "kv_usage": 0.25}}
        body = json.dumps({"workers": [worker]} if self.path == "/status" else {"status": "ready"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
cert, key, *clients = {tls}
if cert:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    for file in filter(None, clients):
        context.load_verify_locations(file)
        context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("listening on", server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What replicas do besides sleeping. `fails` names a pool whose replicas exit at once, `hangs` one whose
    replicas are never ready."""

    shared_memory: bool = False
    orphan: bool = False
    stubborn: bool = False
    fails: str = ""
    hangs: str = ""


PLAIN = Behaviour()


class CheapLauncher:
    """See kvasir_platform.cluster.local.launcher.Launcher."""

    def __init__(self, deployment: Deployment, session: LaunchSession, behaviour: Behaviour = PLAIN) -> None:
        self._deployment = deployment
        self._behaviour = behaviour
        self._children = Children(session.logs, session.env)
        self._replicas: dict[str, tuple[str, Child]] = {}
        self._ready: set[str] = set()

    async def start_cluster(self) -> None:
        """There is no underlying process for the pools."""

    async def start_pools(self) -> None:
        behaviour = self._behaviour
        for pool in self._deployment.pools:
            program = _REPLICA.format(
                stubborn=behaviour.stubborn,
                shared_memory=behaviour.shared_memory,
                orphan=behaviour.orphan,
                fails=behaviour.fails == pool.name,
                hangs=behaviour.hangs == pool.name,
            )
            for number in range(pool.replicas):
                name = f"{pool.name}-{number}"
                child = await self._children.spawn(
                    name, [sys.executable, "-c", program], on_line=self._mark_ready(name)
                )
                self._replicas[name] = (pool.name, child)

    def _mark_ready(self, name: str) -> Callable[[str], None]:
        def on_line(line: str) -> None:
            if line == "ready":
                self._ready.add(name)

        return on_line

    async def pool_status(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(pool, name, "ready" if name in self._ready else "starting", "", str(child.log))
            for name, (pool, child) in self._replicas.items()
        ]

    async def start_router(self) -> str:
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if line.startswith("listening on ") and not listening.done():
                listening.set_result(line.removeprefix("listening on "))

        gateway = self._deployment.gateway
        files = gateway.tls.cert_file, gateway.tls.key_file
        clients = gateway.tls.client_ca_file, gateway.tls.operator_cert_file
        program = _GATEWAY.replace("{port}", str(gateway.port)).replace("{tls}", repr([*files, *clients]))
        child = await self._children.spawn("router", [sys.executable, "-c", program], on_line=on_line)
        exited = asyncio.ensure_future(child.wait())
        ends: set[asyncio.Future[Any]] = {listening, exited}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        if not listening.done():
            raise ended(child)
        return f"127.0.0.1:{listening.result()}"

    async def wait_failed(self) -> StartError:
        return await self._children.wait_failed()

    async def stop(self) -> None:
        await self._children.stop(0.5 if self._behaviour.stubborn else 5.0)
