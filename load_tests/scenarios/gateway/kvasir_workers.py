"""A process with several of Kvasir's workers: scripted engines behind real sessions and real gRPC.

    python -m load_tests.scenarios.gateway.kvasir_workers kvasir.yaml both 4

serves that many workers of a pool, prints their addresses, and then executes one JSON object per line:
{"groups": n} spreads each worker's streams over n messages per step, {"hold": n} makes the workers report n
blocks in total, and {"stats": 1} returns counts of what was sent. Each is answered by one line when it is
done.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import uvloop

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import load
from kvasir.config.load.model_files import resolve_model, tokenizer_digest
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.apps.common.peer_tls import tls_names, worker_files
from kvasir_platform.apps.common.session_token import session_token
from kvasir_workers.server.grpc_server import GrpcServer, ServerTls
from kvasir_workers.server.sessions import SessionHost
from load_tests.index_workload import stored
from load_tests.scenarios.gateway.scripted_engine import ScriptedEngine

SEED = 1


class Workers:
    """All workers of the process."""

    def __init__(self, deployment: Deployment, pool: str, count: int) -> None:
        model = deployment.model
        digest = tokenizer_digest(resolve_model(model.source, model.revision))
        role = deployment.pool(pool).role
        self._pool = pool
        files = worker_files(deployment, pool)
        self._token = session_token(deployment.worker, None)
        self._tls = None if files is None else ServerTls(files, tls_names(deployment).router)
        self._engines = [
            ScriptedEngine(model.name, pool, role, digest, model.context_length) for _ in range(count)
        ]
        self._following: list[asyncio.Task[str]] = []

    async def start(self) -> list[str]:
        """Listen; return the addresses."""
        addresses = []
        clock = MonotonicClock()
        for number, engine in enumerate(self._engines):
            host = await SessionHost.start(
                engine, worker_id=f"{self._pool}-{number}", epoch=time.time_ns() // 1000, clock=clock
            )
            server = GrpcServer(
                host.serve, bind="127.0.0.1:0", token=self._token, snapshot=host.snapshot, tls=self._tls
            )
            addresses.append(f"127.0.0.1:{await server.start()}")
            self._following.append(asyncio.create_task(server.follow(engine.wait_failed)))
        return addresses

    async def obey(self, order: dict[str, int]) -> dict[str, Any]:
        """See the module."""
        if "groups" in order:
            for engine in self._engines:
                engine.regroup(order["groups"])
        if "hold" in order:
            chains: list[list[tuple[int, array[int]]]] = [[] for _ in self._engines]
            for each in stored(SEED, len(self._engines), order["hold"]):
                chains[each.worker].append((each.parent, each.names))
            counts = await asyncio.gather(
                *(engine.hold(iter(chain)) for engine, chain in zip(self._engines, chains, strict=True))
            )
            return {"held": sum(counts)}
        return {
            "messages": sum(engine.messages for engine in self._engines),
            "deltas": sum(engine.deltas for engine in self._engines),
        }


async def _serve(file: Path, pool: str, count: int) -> None:
    workers = Workers(load(file), pool, count)
    _say({"event": "serving", "addresses": await workers.start()})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        _say(await workers.obey(json.loads(line)))


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
