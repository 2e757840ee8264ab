"""Engines over nodes on real Ray, whose nodes declare eight GPUs each, up to where vLLM would start."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.cluster.ray.head import ray_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WIDE = EngineSpec(
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    data_parallel_size=4,
    expert_parallel=True,
    kv_events=False,
    nodes=2,
)


class Orders:
    """The program that runs Ray (tests/kit/cluster/gpu_nodes.py)."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self._log = (folder / "program.log").open("wb")
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.cluster.gpu_nodes", str(folder), deployment.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=os.environ | ray_environment(secrets.token_hex(32), alone=False),
            text=True,
        )

    def __call__(self, order: str) -> Any:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{order}\n")
        self._program.stdin.flush()
        line = self._program.stdout.readline()
        assert line, f"the program ended: {Path(self._log.name).read_text()[-2000:]}"
        return json.loads(line)["answer"]

    def close(self) -> None:
        self._program.communicate(timeout=60)
        self._log.close()


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Orders]:
    """A pool of two engines, each with 16 ranks on two nodes of eight GPUs."""
    pool = PoolSpec(name="wide", role=Role.BOTH, engine=WIDE, gpus=8, replicas=2)
    made = Orders(tmp_path, Deployment(disaggregation="never", pools=(pool,)))
    yield made
    made.close()


def test_an_engine_gets_all_of_its_nodes_or_none(orders: Orders) -> None:
    for resource in ("kvasir-pool-wide", "kvasir-follower-wide", "kvasir-pool-wide"):
        orders(f"node {resource}")
    one = orders("placed 2")
    assert sorted(each["rank"] for each in one) == [0, 1]
    # The second engine has room for its first node, and does not take it: another engine could.
    assert orders("waiting") == {"states": {"CREATED": 1, "PENDING": 1}, "strategies": ["PACK"]}
    assert orders("free") == 8
    orders("node kvasir-follower-wide")
    both = orders("placed 4")
    assert orders("free") == 0
    assert len({each["node"] for each in both}) == 4, "each node of an engine is a node of Ray"
    assert {each["gpus"] for each in both} == {"0,1,2,3,4,5,6,7"}
    for _, engine in groupby(sorted(both, key=lambda each: each["port"]), key=lambda each: each["port"]):
        assert sorted(each["rank"] for each in engine) == [0, 1], "both nodes know the same leader"
