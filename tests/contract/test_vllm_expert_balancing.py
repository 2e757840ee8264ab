"""What vLLM's load balancer of experts does with a spec, on CPU tensors and over gloo.

On GPUs the same code moves experts between ranks over NCCL or NIXL.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.config.spec.deployment import EngineSpec
from kvasir.sizing.dimensions import dimensions
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import WeightKind, rank_share

pytestmark = [pytest.mark.slow, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]


def test_copies_go_to_the_busiest_experts_and_every_rank_has_as_many_as_the_arithmetic_says() -> None:
    torch: Any = pytest.importorskip("torch")
    policies = pytest.importorskip("vllm.distributed.eplb.policy")
    spec = EngineSpec.model_validate(
        {"data_parallel_size": 16, "expert_parallel": True, "eplb": {"redundant_experts": 32}}
    )
    sizes = dimensions(models.config_of(models.DEEPSEEK_V3))
    shape = EngineShape(data=16, expert_parallel=True, redundant_experts=32)
    each = rank_share(WeightKind.EXPERT, sizes, shape) * sizes.experts
    assert (sizes.experts, spec.ranks, each) == (256, 16, 18)
    loads = torch.ones(1, sizes.experts, dtype=torch.int64)
    loads[0, 7] = 10_000
    (placed,) = policies.EPLB_POLICIES["default"].rebalance_experts(loads, 288, 1, 2, spec.ranks)
    counts = torch.bincount(placed, minlength=sizes.experts)
    assert len(placed) == each * spec.ranks
    assert counts.min() == 1
    assert counts.argmax() == 7
    holders = {at // 18 for at, expert in enumerate(placed.tolist()) if expert == 7}
    assert len(holders) == spec.ranks, "each rank has a copy of the busiest"


def test_after_a_move_each_rank_has_the_weights_of_the_experts_that_the_plan_gives_it(tmp_path: Path) -> None:
    rng = random.Random(3)
    ranks, layers, experts, copies = 2, 3, 8, 2
    loads = [[rng.randrange(1000) for _ in range(experts)] for _ in range(layers)]
    spec = json.dumps({"loads": loads, "copies": copies})
    command = [sys.executable, "-m", "tests.kit.cluster.expert_rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "store"), spec],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    unmoved = [place % experts for place in range(experts + copies)]
    for layer in range(layers):
        for each in found:
            for held in each["held"][layer]:
                assert held == each["planned"][layer]
        everywhere = [expert for each in found for expert in each["planned"][layer]]
        assert set(everywhere) == set(range(experts))
        busiest = loads[layer].index(max(loads[layer]))
        assert everywhere.count(busiest) > 1
    assert any(each["planned"][layer] != unmoved[:5] for each in found[:1] for layer in range(layers))
