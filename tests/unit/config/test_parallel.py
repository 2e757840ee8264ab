"""How the ranks of an engine share experts and nodes: valid specs, and the checks that need the model."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tests.kit import public_models as models

from kvasir.config.checks.all2all import ALL2ALL_BACKENDS
from kvasir.config.load.model_support import model_problems
from kvasir.config.load.parallel_support import missing_kernels
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec
from kvasir.core.requests import Role

WIDE: dict[str, Any] = {"data_parallel_size": 16, "expert_parallel": True, "nodes": 2, "kv_events": False}


def pool(gpus: float = 8, **engine: Any) -> PoolSpec:
    return PoolSpec(name="wide", role=Role.BOTH, gpus=gpus, engine=EngineSpec(**engine))


def problems(values: dict[str, Any], gpus: float = 8, **engine: Any) -> list[str]:
    deployment = Deployment(disaggregation="never", pools=(pool(gpus, **engine),))
    return [str(problem) for problem in model_problems(deployment, models.config_of(values))]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"all2all_backend": "deepep_v2"}, "all2all_backend: it needs expert parallelism"),
        ({"eplb": {}}, "eplb: it needs expert parallelism"),
        ({"eplb": {}, "expert_parallel": True}, "eplb: one rank has all experts"),
        (
            {"eplb": {}, "expert_parallel": True, "data_parallel_size": 2, "all2all_backend": "moonep"},
            "eplb: moonep cannot move experts",
        ),
        ({"dual_batch_overlap": True, "expert_parallel": True}, "dual_batch_overlap: it needs data-parallel"),
        (
            {"dual_batch_overlap": True, "expert_parallel": True, "data_parallel_size": 2},
            "set all2all_backend to one of deepep_low_latency",
        ),
        ({"all2all_backend": "pplx", "expert_parallel": True}, "all2all_backend"),
    ],
)
def test_options_of_experts_that_would_do_nothing_or_fail_are_refused(
    engine: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineSpec(**engine)


def test_data_parallel_ranks_over_nodes_report_no_kv() -> None:
    with pytest.raises(ValidationError, match="kv_events: data-parallel ranks on other nodes"):
        EngineSpec(data_parallel_size=2, nodes=2)
    assert EngineSpec(data_parallel_size=2, nodes=2, kv_events=False).expert_ranks == 2


def test_a_model_whose_experts_divide_is_served() -> None:
    assert problems(models.DEEPSEEK_V3, **WIDE) == []
    assert problems(models.DEEPSEEK_V3, **WIDE, eplb={"redundant_experts": 32}) == []


def test_copies_that_do_not_divide_are_refused_with_the_next_number_that_does() -> None:
    (found,) = problems(models.DEEPSEEK_V3, **WIDE, eplb={"redundant_experts": 20})
    assert found.startswith("pools.wide.engine.eplb.redundant_experts: 256 experts and 20 copies")
    assert found.endswith("; set redundant_experts to 32")


def test_only_kernels_that_take_uneven_experts_get_them() -> None:
    uneven = {"data_parallel_size": 3, "expert_parallel": True}
    assert problems(models.QWEN3_30B, **uneven) == []
    (found,) = problems(models.QWEN3_30B, **uneven, all2all_backend="deepep_low_latency")
    assert found.endswith("; set eplb: {redundant_experts: 1}, or all2all_backend: allgather_reducescatter")
    assert problems(models.QWEN3_30B, **uneven, eplb={"redundant_experts": 1}) == []


def test_ranks_without_an_expert_are_refused() -> None:
    few = models.QWEN3_30B | {"num_experts": 8}
    (found,) = problems(few, **WIDE)
    assert "8 experts in a layer for 16 tensor x data parallel ranks" in found
    assert "8 ranks or fewer" in found


def test_a_model_without_experts_has_nothing_to_divide() -> None:
    (found,) = problems(models.LLAMA_8B, tensor_parallel_size=8, expert_parallel=True)
    assert found == "pools.wide.engine.expert_parallel: the model has no experts; leave it off"
    (found,) = problems(models.LLAMA_8B, data_parallel_size=2, nodes=2, kv_events=False)
    assert found.startswith("pools.wide.engine.data_parallel_size: 2 ranks over 2 nodes")
    assert problems(models.LLAMA_8B, data_parallel_size=2) == []


def test_ranks_on_cpus_cannot_exchange_the_tokens_of_experts() -> None:
    (found,) = problems(models.QWEN3_30B, gpus=0, data_parallel_size=2)
    assert found.endswith("; set it to 1 and use more replicas")
    assert problems(models.QWEN3_30B, gpus=0, tensor_parallel_size=2) == []
    assert problems(models.LLAMA_8B, gpus=0, data_parallel_size=2) == []


def test_kernels_that_are_not_installed_are_named_with_how_to_install_them() -> None:
    engine = {"data_parallel_size": 2, "expert_parallel": True}
    for backend in ALL2ALL_BACKENDS:
        spread = pool(**engine, all2all_backend=backend)
        assert missing_kernels([spread], lambda _: True) == []
        found = missing_kernels([spread], lambda _: False)
        if backend == "allgather_reducescatter":
            assert found == []
        else:
            (reason,) = found
            assert reason.startswith(f"pools.wide.engine.all2all_backend: {backend} needs the Python module ")
            assert reason.endswith(", or set allgather_reducescatter")
    assert missing_kernels([pool(**engine)], lambda _: False) == []


def test_each_data_parallel_rank_of_a_replica_has_a_batch_of_its_own() -> None:
    assert EngineSpec(max_num_seqs=8, data_parallel_size=2).largest_batch == 16
