"""One engine over several nodes: valid specs, and the arguments of each node's part of vLLM."""

from __future__ import annotations

import json
import os
import queue
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from kvasir.checkpoint.kv_movement import KvMovement
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.deployment import Deployment, EngineSpec, ExpertBalancingSpec, PoolSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.media.prompts import MediaKind
from kvasir.core.requests import Role
from kvasir_workers.engines.nodes import NodePlace, leading
from kvasir_workers.engines.vllm.embedding import embedding_arguments
from kvasir_workers.engines.vllm.follower import follower_arguments
from kvasir_workers.engines.vllm.runtime import worker_extension
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments, environment

FIRST = NodePlace(0, "10.0.0.1", "10.0.0.1", 4000, 4001)
SECOND = replace(FIRST, rank=1, address="10.0.0.2")
WIDE = EngineSpec(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2)

WIDE_EXPERTS = EngineSpec(
    data_parallel_size=16,
    nodes=2,
    kv_events=False,
    expert_parallel=True,
    all2all_backend="deepep_low_latency",
    eplb=ExpertBalancingSpec(redundant_experts=32, window_steps=500, interval_steps=1000),
    dual_batch_overlap=True,
)


def deployment(
    engine: EngineSpec = WIDE, role: Role = Role.BOTH, gpus: float = 8, **changes: Any
) -> Deployment:
    pool = PoolSpec(name="wide", role=role, engine=engine, gpus=gpus)
    return Deployment(**({"disaggregation": "never", "pools": (pool,)} | changes))


@pytest.mark.parametrize(
    ("engine", "word"),
    [
        ({"nodes": 2}, "choose a divisor"),
        ({"tensor_parallel_size": 4, "nodes": 3}, "4 ranks"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3, "nodes": 2}, "one divides the other"),
        ({"tensor_parallel_size": 2, "kind": "sim", "nodes": 2}, "one process"),
    ],
)
def test_nodes_that_cannot_share_one_engine_are_refused(engine: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=f"nodes: .*{word}"):
        EngineSpec(**engine)


def test_gpus_are_counted_for_each_node() -> None:
    assert unsupported_features(deployment(), platform="cuda") == []
    (reason,) = unsupported_features(deployment(gpus=7), platform="cuda")
    assert reason.startswith("pools.wide.gpus: 7, and the engine's ranks need 8 ")


ON_TWO_NODES = EngineSpec(tensor_parallel_size=2, nodes=2)
ONE_ON_EACH = EngineSpec(data_parallel_size=2, nodes=2, kv_events=False)


@pytest.mark.parametrize(
    ("engine", "tiers", "refused"),
    [
        (ON_TWO_NODES, TiersSpec(cpu=CpuTierSpec()), ""),
        (ON_TWO_NODES, TiersSpec(disk=DiskTierSpec(path="/kv")), "tiers.disk"),
        (
            ON_TWO_NODES,
            TiersSpec(cpu=CpuTierSpec(), redis=RedisTierSpec(url="redis://r:6379")),
            "tiers.redis",
        ),
        (ONE_ON_EACH, TiersSpec(disk=DiskTierSpec(path="/kv")), ""),
    ],
)
def test_lower_tiers_are_kept_by_ranks_that_share_a_node(
    engine: EngineSpec, tiers: TiersSpec, refused: str
) -> None:
    reasons = unsupported_features(deployment(engine, gpus=1, tiers=tiers), platform="cuda")
    assert [reason.partition(":")[0] for reason in reasons] == ([refused] if refused else [])
    assert all("use tiers.cpu alone, or set pools.wide.engine.nodes" in reason for reason in reasons)


def apart(prefill: EngineSpec, decode: EngineSpec) -> Deployment:
    """Prefill and decode on eight GPUs of each node."""
    engines = {Role.PREFILL: prefill, Role.DECODE: decode}
    pools = [PoolSpec(name=role.value, role=role, engine=each, gpus=8) for role, each in engines.items()]
    return Deployment(pools=tuple(pools))


def test_engines_over_nodes_and_stages_hand_kv_over() -> None:
    spec = apart(WIDE, EngineSpec(tensor_parallel_size=8, nodes=2))
    assert unsupported_features(spec, platform="cuda") == []
    movement = KvMovement(layers=4, widened=1, window=8)
    pool = spec.pools[0]
    first, second = (
        follower_arguments(spec, pool, model_path="/m", platform="cuda", place=place, movement=movement)
        for place in (FIRST, SECOND)
    )
    assert second["disable_hybrid_kv_cache_manager"] is True
    assert {name for name in first if first[name] != second[name]} == {"node_rank"}


def test_ranks_on_other_nodes_have_the_same_bounds_of_images() -> None:
    spec = deployment(WIDE)
    pool = spec.pools[0]
    told: dict[str, Any] = {"model_path": "/m", "platform": "cuda", "media": [MediaKind.IMAGE]}
    first, second = (follower_arguments(spec, pool, place=place, **told) for place in (FIRST, SECOND))
    assert second["limit_mm_per_prompt"] == {"image": 8, "video": 0, "audio": 0}
    assert {name for name in first if first[name] != second[name]} == {"node_rank"}


def test_ranks_on_other_nodes_serve_kv_where_it_can_be_reached() -> None:
    spec = apart(WIDE, WIDE)
    pod = spec.worker.model_copy(update={"host": "pod"})
    reasons = unsupported_features(spec.model_copy(update={"worker": pod}), platform="cuda")
    assert [each.partition(" on several nodes serve KV at 127.0.0.1")[0] for each in reasons] == [
        "transfer.host: ranks of prefill",
        "transfer.host: ranks of decode",
    ]
    served = spec.transfer.model_copy(update={"host": "pod"})
    whole = spec.model_copy(update={"worker": pod, "transfer": served})
    assert unsupported_features(whole, platform="cuda") == []


def test_engines_that_divide_layers_differently_know_of_each_other_s_stages() -> None:
    for decode, stages in ((EngineSpec(tensor_parallel_size=8), [1, 2]), (WIDE, [])):
        spec = apart(WIDE, decode)
        for pool in spec.pools:
            made = engine_arguments(spec, pool, model_path="/m", platform="cuda", place=FIRST)
            assert made["kv_transfer_config"]["kv_connector_extra_config"]["stages"] == stages


def test_tensor_parallel_ranks_may_be_on_several_nodes_without_gpus_too() -> None:
    assert (
        unsupported_features(deployment(EngineSpec(tensor_parallel_size=2, nodes=2), gpus=0), platform="cpu")
        == []
    )


@pytest.mark.parametrize("engine", [WIDE, WIDE_EXPERTS], ids=["stages", "experts"])
@pytest.mark.parametrize(
    ("role", "makes"), [(Role.BOTH, engine_arguments), (Role.EMBED, embedding_arguments)]
)
def test_nodes_are_told_the_same_but_for_which_they_are(role: Role, makes: Any, engine: EngineSpec) -> None:
    spec = deployment(engine, role=role)
    pool = spec.pools[0]
    first = makes(spec, pool, model_path="/m", platform="cuda", place=FIRST)
    second = follower_arguments(spec, pool, model_path="/m", platform="cuda", place=SECOND)
    assert (first["nnodes"], first["master_addr"], first["master_port"]) == (2, "10.0.0.1", 4000)
    assert first["distributed_executor_backend"] == "mp"
    assert (first.pop("node_rank"), second.pop("node_rank")) == (0, 1)
    assert first == second
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize("engine", [WIDE_EXPERTS, WIDE])
def test_cores_of_data_parallel_ranks_connect_to_the_first_node(engine: EngineSpec) -> None:
    spec = deployment(engine)
    made = follower_arguments(spec, spec.pools[0], model_path="/m", platform="cuda", place=SECOND)
    front = {"data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 4001}
    assert front.items() <= made.items() if engine is WIDE_EXPERTS else not front.keys() & made.keys()


def test_the_options_of_experts_reach_vllm() -> None:
    spec = deployment(WIDE_EXPERTS)
    made = engine_arguments(spec, spec.pools[0], model_path="/m", platform="cuda", place=FIRST)
    named = ("enable_expert_parallel", "all2all_backend", "enable_eplb", "eplb_config", "enable_dbo")
    assert [made[name] for name in named] == [
        True,
        "deepep_low_latency",
        True,
        {"num_redundant_experts": 32, "window_size": 500, "step_interval": 1000},
        True,
    ]
    plain = engine_arguments(deployment(), deployment().pools[0], model_path="/m", platform="cuda")
    assert [name for name in named if name in plain] == ["enable_expert_parallel"]


def test_ranks_of_one_node_cannot_be_reached_from_others_and_those_of_several_must_be() -> None:
    spec = deployment()
    pool = spec.pools[0]
    assert environment(spec, pool, cpus=4, platform="cuda")["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment(spec, pool, cpus=4, platform="cuda", place=SECOND)["VLLM_HOST_IP"] == "10.0.0.2"
    one = engine_arguments(spec, pool, model_path="/m", platform="cuda")
    assert "master_addr" not in one


def test_the_first_node_takes_ports_that_are_free() -> None:
    place = leading("127.0.0.1")
    with socket.socket() as ranks, socket.socket() as cores:
        ranks.bind((place.leader, place.port))
        cores.bind((place.leader, place.rpc_port))
    assert (place.rank, place.address, place.leader) == (0, "127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("place", "above"),
    [
        ({"node_rank": 0}, 0),
        ({"node_rank": 1, "data_parallel_size": 1, "node_rank_within_dp": 1}, 1),
        # Each data-parallel rank has a core between it and the node's process.
        ({"node_rank": 1, "data_parallel_size": 2, "node_rank_within_dp": 0}, 2),
        ({"node_rank": 3, "data_parallel_size": 2, "node_rank_within_dp": 1}, 1),
    ],
    ids=["first node", "further node", "core on a further node", "further node of a core"],
)
def test_ranks_leave_with_the_front_and_on_a_further_node_with_its_process(
    place: dict[str, int], above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()

    def leave_with(front: int, core: int | None) -> None:
        told = Path(f"/proc/self/fdinfo/{front}").read_text().partition("Pid:")[2]
        left.put(int(told.split()[0]))
        for each in (front, core):
            if each is not None:
                os.close(each)

    monkeypatch.setattr(worker_extension, "_leave_with", leave_with)
    extension = worker_extension.EngineExtension()
    extension.parallel_config = SimpleNamespace(**place)
    front = os.getpid()
    line = [front, os.getppid(), psutil.Process().parents()[1].pid]
    assert extension.kvasir_leave_with(front) == os.getpid()
    assert left.get(timeout=10) == line[above]
