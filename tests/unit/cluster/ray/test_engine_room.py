"""Resources reserved in Ray for replicas, on one node and on several."""

from __future__ import annotations

from kvasir.config.spec.deployment import EngineSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.cluster.ray.engine_resources import bundles, preloaded, shares
from kvasir_workers.engines.signing.signed_tcp import LIBRARY


def pool(nodes: int, gpus: float = 0) -> PoolSpec:
    engine = EngineSpec(tensor_parallel_size=nodes, nodes=nodes)
    return PoolSpec(name="wide", role=Role.BOTH, engine=engine, cpus=2, gpus=gpus)


def test_a_replica_on_one_node_takes_its_share_and_no_group() -> None:
    assert shares(pool(1, gpus=1), None) == [{"num_cpus": 2, "num_gpus": 1}]
    assert bundles(shares(pool(1), None)) is None


def test_a_replica_in_pods_takes_a_first_one_and_the_others_of_one_template() -> None:
    first, *others = shares(pool(3, gpus=8), "0a1b2c3d")
    template = {"kvasir-template-0a1b2c3d": 1}
    assert first["resources"] == {"kvasir-pool-wide": 1} | template
    assert [each["resources"] for each in others] == [{"kvasir-follower-wide": 1} | template] * 2
    assert {each["num_gpus"] for each in (first, *others)} == {8}
    assert shares(pool(1), "")[0]["resources"] == {"kvasir-pool-wide": 1}


def test_a_group_has_room_for_all_nodes_and_nothing_that_is_none() -> None:
    assert bundles(shares(pool(2), None)) == [{"CPU": 2}, {"CPU": 2}]
    assert bundles(shares(pool(2, gpus=8), "")) == [
        {"GPU": 8, "kvasir-pool-wide": 1},
        {"GPU": 8, "kvasir-follower-wide": 1},
    ]


def test_only_the_front_of_ranks_on_several_nodes_is_started_with_the_library_that_signs() -> None:
    def variables(**engine: object) -> dict[str, str]:
        options = preloaded(EngineSpec.model_validate({"kv_events": False, **engine}))
        found: dict[str, str] = options.get("runtime_env", {}).get("env_vars", {})
        return found

    assert variables(nodes=2, data_parallel_size=2) == {"LD_PRELOAD": str(LIBRARY)}
    assert variables(nodes=2, tensor_parallel_size=2) == {}
    assert variables(data_parallel_size=2) == {}
    assert variables(nodes=2, data_parallel_size=2, unauthenticated_rendezvous=True) == {}
