"""A private Ray of nodes that say they have GPUs, and engines that record where they would start.

Run as a program, because Ray reads its token when it is imported:

    python -m tests.kit.cluster.gpu_nodes FOLDER SPEC

FOLDER gets the records, SPEC is a deployment in JSON. Each line of standard input is an order, answered by a
line of JSON: `node RESOURCE` starts a node, `placed N` waits for N records, `waiting` counts Ray's groups by
state once one waits, `free` counts GPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cluster.ray.head import RayHead, head_environment, ray_environment
from kvasir_platform.cluster.ray.pod_templates import PodTemplate, template_resource
from kvasir_workers.engines.nodes import NodePlace, leading
from kvasir_workers.pool.followers import NodePlan

RECORDS = "KVASIR_TEST_RECORDS"
TEMPLATE = "0a1b2c3d"
GPUS = 8
PATIENCE_S = 90.0


def _record(place: NodePlace) -> None:
    import ray

    found = {
        "rank": place.rank,
        "leader": place.leader,
        "port": place.port,
        "node": ray.get_runtime_context().get_node_id(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }
    folder = Path(os.environ[RECORDS])
    (folder / f"{place.port}-{place.rank}.json").write_text(json.dumps(found))


def lead(deployment: Deployment) -> NodePlace:
    """Return the place of the first node."""
    return leading("127.0.0.2")


async def follow(deployment: Deployment, pool: str, rank: int, leader: NodePlace) -> str:
    """Record a further node, and stay there."""
    _record(NodePlace(rank, "127.0.0.2", leader.leader, leader.port, leader.rpc_port))
    await asyncio.Event().wait()
    return ""


async def start(deployment: Deployment, pool: str, token: str, place: NodePlace | None) -> Any:
    """Record the first node, where the engine would be started, and stay there."""
    if place is None:
        raise ValueError("an engine over nodes gets its place")
    _record(place)
    await asyncio.Event().wait()


class GpuNodes:
    """A head without GPUs, and nodes with GPUS each."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        from kvasir_platform.cluster.ray.pools import RayPools

        token = os.environ["RAY_AUTH_TOKEN"]
        temp = Path("/tmp") / f"kvg{secrets.token_hex(3)}"
        os.environ[RECORDS] = str(folder)
        self._folder = folder
        self._head = RayHead.start(
            temp_dir=temp, token=token, cpus=1, gpus=0, log=folder / "ray.log", alone=False
        )
        self._env = os.environ | ray_environment(token, alone=False) | head_environment(temp, None)
        self._nodes: list[subprocess.Popen[bytes]] = []
        pods = {pool.name: PodTemplate(TEMPLATE, 8) for pool in deployment.pools}
        self.pools = RayPools(deployment, self._head.address, in_pods=True, pods=pods)
        self.pools.connect()
        self.pools.deploy(start, MonotonicClock(), token, NodePlan(follow=follow, lead=lead))

    def node(self, resource: str) -> None:
        """Start a node with a place of this kind, and wait until Ray has it."""
        import ray

        before = sum(node["Alive"] for node in ray.nodes())
        resources = json.dumps({resource: 1, template_resource(TEMPLATE): 1})
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self._head.address}"]
        command += [f"--num-gpus={GPUS}", "--num-cpus=1", f"--resources={resources}", "--block"]
        command += ["--node-ip-address=127.0.0.2", "--object-store-memory=83886080", "--disable-usage-stats"]
        with (self._folder / "nodes.log").open("ab") as log:
            self._nodes.append(
                subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        _until(lambda: sum(node["Alive"] for node in ray.nodes()) > before, f"a node with {resource}")

    def placed(self, wanted: int) -> list[dict[str, Any]]:
        """Return the records, once there are as many as `wanted`."""
        _until(lambda: len(self._records()) >= wanted, f"{wanted} nodes of engines")
        return [json.loads(path.read_text()) for path in self._records()]

    def waiting(self) -> dict[str, Any]:
        """Return how many of Ray's groups are in each state, once one of them waits, and their strategies."""
        from ray.util import placement_group_table

        def states() -> Counter[str]:
            return Counter(group["state"] for group in placement_group_table().values())

        _until(lambda: states()["PENDING"] > 0, "a group that waits")
        strategies = {group["strategy"] for group in placement_group_table().values()}
        return {"states": dict(states()), "strategies": sorted(strategies)}

    def free_gpus(self) -> float:
        """Return the GPUs that no engine has."""
        import ray

        return float(ray.available_resources().get("GPU", 0.0))

    def close(self) -> None:
        """End everything that was started."""
        self.pools.leave()
        for node in self._nodes:
            node.terminate()
        self._head.stop()
        for node in self._nodes:
            node.wait()

    def _records(self) -> list[Path]:
        return sorted(self._folder.glob("*-*.json"))


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.2)


def main(folder: Path, spec: str) -> None:
    """Follow the orders of standard input."""
    nodes = GpuNodes(folder, Deployment.model_validate_json(spec))
    try:
        for line in sys.stdin:
            order, _, operand = line.strip().partition(" ")
            answer: Any = None
            match order:
                case "node":
                    nodes.node(operand)
                case "placed":
                    answer = nodes.placed(int(operand))
                case "waiting":
                    answer = nodes.waiting()
                case "free":
                    answer = nodes.free_gpus()
            sys.stdout.write(json.dumps({"answer": answer}) + "\n")
            sys.stdout.flush()
    finally:
        nodes.close()


if __name__ == "__main__":
    # The actors import these functions by this name.
    from tests.kit.cluster import gpu_nodes

    gpu_nodes.main(Path(sys.argv[1]), sys.argv[2])
