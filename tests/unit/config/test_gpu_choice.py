"""How many GPUs each replica gets where the spec leaves it open."""

from __future__ import annotations

import json

import pytest

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.gpu_choice import GpuChoice, reserved_gpus, with_chosen_gpus
from kvasir.config.load.loader import dump, load, loads, schema
from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.cluster.ray.engine_resources import head_gpus

PAIR = "pools=[{name: prefill, role: prefill}, {name: decode, role: decode}]"


def chosen(present: int, *options: str, platform: Platform = "cuda") -> GpuChoice:
    return with_chosen_gpus(load(None, options), present=present, platform=platform)


def numbers(choice: GpuChoice) -> dict[str, object]:
    return {pool.name: pool.gpus for pool in choice.deployment.pools}


@pytest.mark.parametrize("present", [2, 8])
def test_the_default_pair_gets_a_gpu_each(present: int) -> None:
    choice = chosen(present)
    assert numbers(choice) == {"prefill": 1.0, "decode": 1.0}
    assert choice.reason == f"{present} GPUs are here, one for each rank: prefill 1, decode 1"


def test_a_replica_gets_one_for_each_rank_on_each_of_its_nodes() -> None:
    engine = "engine: {tensor_parallel_size: 2, pipeline_parallel_size: 2, data_parallel_size: 2}"
    assert numbers(chosen(8, "disaggregation=never", f"pools=[{{name: s, role: both, {engine}}}]")) == {
        "s": 8.0
    }
    engine = "engine: {tensor_parallel_size: 4, nodes: 2}"
    assert numbers(chosen(8, "disaggregation=never", f"pools=[{{name: s, role: both, {engine}}}]")) == {
        "s": 2.0
    }


@pytest.mark.parametrize("options", [(), ("disaggregation=auto",), ("model.source=/m",)])
def test_on_one_gpu_the_default_pair_becomes_one_pool(options: tuple[str, ...]) -> None:
    choice = chosen(1, *options)
    assert numbers(choice) == {"serve": 1.0}
    assert choice.deployment.disaggregation == "never"
    assert choice.deployment.pools[0].role is Role.BOTH
    assert choice.reason.startswith(
        "1 GPU is here, and prefill and decode apart take 2: pool serve does both"
    )


@pytest.mark.parametrize("options", [("disaggregation=always",), (PAIR,)])
def test_pools_that_the_spec_demands_share_one_gpu_and_its_memory(options: tuple[str, ...]) -> None:
    choice = chosen(1, *options)
    assert numbers(choice) == {"prefill": 0.5, "decode": 0.5}
    assert choice.deployment.pool("decode").gpu_utilization == 0.45
    assert choice.reason == "1 GPU is here, shared in equal parts, as is the memory: prefill 0.5, decode 0.5"


def test_several_gpus_take_as_many_replicas_each() -> None:
    choice = chosen(2, PAIR, "pools.decode.replicas=4")
    assert numbers(choice) == {"prefill": 0.3333, "decode": 0.3333}
    # Five thirds of a GPU are two for Ray, and three thirds one.
    assert head_gpus(choice.deployment, 2) == 2
    three = chosen(1, PAIR, "pools.decode.replicas=2")
    assert reserved_gpus(three.deployment.pools) == 0.9999
    assert head_gpus(three.deployment, 1) == 1


def test_numbers_of_the_spec_stay_and_the_others_have_what_they_leave() -> None:
    assert numbers(chosen(4, PAIR, "pools.prefill.gpus=0.5")) == {"prefill": 0.5, "decode": 1.0}
    assert numbers(chosen(1, PAIR, "pools.prefill.gpus=0.75")) == {"prefill": 0.75, "decode": 0.25}
    assert numbers(chosen(2, PAIR, "pools.prefill.engine.tensor_parallel_size=1")) == {
        "prefill": 1.0,
        "decode": 1.0,
    }
    stated = chosen(8, PAIR, "pools.prefill.gpus=1", "pools.decode.gpus=0")
    assert (numbers(stated), stated.reason) == ({"prefill": 1.0, "decode": 0.0}, "")


def test_only_pools_of_one_rank_and_a_fixed_size_share() -> None:
    wide = "pools.decode.engine.tensor_parallel_size=2"
    assert numbers(chosen(2, PAIR, wide)) == {"prefill": 1.0, "decode": 2.0}
    two = "pools=[{name: a, role: both}, {name: b, role: both}, {name: wide, role: both, \
engine: {tensor_parallel_size: 2}}]"
    shared = chosen(3, "disaggregation=never", two)
    assert numbers(shared) == {"a": 0.5, "b": 0.5, "wide": 2.0}
    growing = chosen(1, PAIR, "pools.decode.scaling={max: 4}")
    assert numbers(growing) == {"prefill": 1.0, "decode": 1.0}


def test_without_a_gpu_or_with_the_build_for_cpus_there_are_none() -> None:
    assert (numbers(chosen(0, platform="cpu")), chosen(0, platform="cpu").reason) == (
        {"prefill": 0.0, "decode": 0.0},
        "",
    )
    unused = chosen(2, platform="cpu")
    assert numbers(unused) == {"prefill": 0.0, "decode": 0.0}
    assert unused.reason == "2 GPUs are here and not used: vLLM's build for CPUs is installed"


def test_the_build_for_gpus_without_one_says_so_and_leaves_the_spec_as_it_is() -> None:
    choice = chosen(0)
    assert choice.missing == (
        "vLLM's build for GPUs is installed, and there is no GPU here for prefill, decode"
    )
    assert choice.deployment == Deployment()


def test_a_pool_that_names_its_gpu_gets_one_for_each_rank_wherever_it_is_looked_at() -> None:
    engine = EngineSpec(tensor_parallel_size=4, pipeline_parallel_size=2, nodes=2)
    pool = PoolSpec(name="wide", role=Role.BOTH, gpu="H100", engine=engine)
    assert (pool.gpus, pool.reserved_gpus) == ("auto", 4.0)
    named = Deployment(disaggregation="never", pools=(pool,))
    for present in (0, 1, 8):
        assert numbers(with_chosen_gpus(named, present=present, platform="cuda")) == {"wide": 4.0}


def test_simulated_engines_take_none() -> None:
    simulated = ["pools.prefill.engine.kind=sim", "pools.decode.engine.kind=sim"]
    assert numbers(chosen(8, *simulated)) == {"prefill": 0.0, "decode": 0.0}
    assert chosen(0, *simulated).missing == ""
    assert numbers(chosen(0, *simulated, "pools.decode.gpu=H100"))["decode"] == 0.0


def test_what_was_chosen_is_read_again_as_it_was_written() -> None:
    choice = chosen(1, PAIR)
    assert loads(dump(choice.deployment), "k.yaml") == choice.deployment


def test_gpus_are_a_number_or_auto() -> None:
    (number, auto) = schema()["$defs"]["PoolSpec"]["properties"]["gpus"]["anyOf"]
    assert (number["minimum"], auto["const"]) == (0, "auto")
    assert json.loads(dump(load(None)))["pools"][0]["gpus"] == "auto"
    for wrong in ("many", -1):
        with pytest.raises(SpecError, match="a number at least 0 or auto"):
            load(None, [f"pools.prefill.gpus={wrong}"])


def test_ray_counts_every_gpu_of_the_machine_so_that_pools_can_grow() -> None:
    assert head_gpus(chosen(8).deployment, 8) == 8
    assert head_gpus(chosen(8, platform="cpu").deployment, 8) == 0
    assert head_gpus(load(None, [PAIR, "pools.decode.gpus=4"]), 2) == 4
