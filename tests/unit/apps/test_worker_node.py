"""Configuration of a worker process in a deployment with several models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.model_folder import write_model, write_safetensors

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import loads
from kvasir.config.spec.deployment import Deployment, SloSpec
from kvasir.config.spec.routing import strictest
from kvasir.core.errors import ConfigError
from kvasir_platform.apps.worker_node import build_engine, worker_view
from kvasir_workers.engines.sim.embedding import SimEmbeddingEngine
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.pool.fence import fence_name

SEVERAL = """
disaggregation: never
models: [{name: second}, {name: vectors}]
pools:
  - {name: first, role: both, replicas: 2}
  - {name: second, role: both, model: second}
  - {name: vectors, role: embed, model: vectors, engine: {tensor_parallel_size: 3}}
"""


def test_a_worker_sees_its_own_model_only_and_has_its_part_of_the_machine() -> None:
    view = worker_view(loads(SEVERAL, "t.yaml"), "second", 12)
    assert (view.model.name, [pool.name for pool in view.pools]) == ("second", ["second"])
    # Two, one and three ranks share the machine, whichever model they serve.
    assert view.pool("second").engine.threads == 2


def test_threads_that_the_spec_names_stay() -> None:
    spec = loads(SEVERAL, "t.yaml", ["pools.second.engine.threads=7"])
    assert worker_view(spec, "second", 12).pool("second").engine.threads == 7


def test_a_worker_in_a_pod_of_its_own_has_all_the_pods_cpus() -> None:
    view = worker_view(loads(SEVERAL, "t.yaml"), "vectors", 12, alone=True)
    assert view.pool("vectors").engine.threads == 4
    assert worker_view(Deployment(), "decode", 4, alone=True).pool("decode").engine.threads == 4


def test_of_one_model_workers_share_the_cpus_that_may_be_used() -> None:
    view = worker_view(Deployment(), "decode", 4)
    assert [(pool.name, pool.engine.threads) for pool in view.pools] == [("prefill", 2), ("decode", 2)]


def test_a_pool_that_embeds_gets_an_engine_that_does() -> None:
    sim = [f"pools.{name}.engine.kind=sim" for name in ("first", "second", "vectors")]
    spec = loads(SEVERAL, "t.yaml", sim)
    kinds = []
    for pool in ("first", "vectors"):
        view = worker_view(spec, pool, 4)
        kinds.append(type(build_engine(view, view.pool(pool), MonotonicClock())))
    assert kinds == [SimEngine, SimEmbeddingEngine]


def test_a_leg_of_an_unknown_class_is_judged_by_what_any_class_promises() -> None:
    deployment = Deployment(
        slo=(SloSpec(name="chat", ttft_s=2.0, itl_s=0.05), SloSpec(name="search", ttft_s=0.5, itl_s=1.0))
    )
    promised = strictest(deployment.slo)
    assert (promised.ttft_s, promised.itl_s) == (0.5, 0.05)


def test_replicas_are_compared_with_those_of_their_own_model() -> None:
    spec = loads(SEVERAL, "t.yaml")
    names = [fence_name(spec, pool) for pool in ("first", "second", "vectors")]
    assert names == ["kvasir/kvasir/fence", "kvasir/kvasir/fence-1", "kvasir/kvasir/fence-2"]
    assert fence_name(Deployment(), "prefill") == fence_name(Deployment(), "decode") == "kvasir/kvasir/fence"


def test_a_model_that_cannot_be_served_is_refused_before_an_engine_is_imported(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
    folder = write_model(tmp_path, config)
    write_safetensors(folder / "model.safetensors", {"w": ("BF16", (8,))}, missing_bytes=1)
    spec = loads("", "t.yaml", [f"model.source={folder}"])
    with pytest.raises(ConfigError, match=r"model.safetensors is truncated"):
        build_engine(spec, spec.pool("decode"), MonotonicClock())
    write_model(tmp_path, config | {"architectures": ["BertModel"]})
    with pytest.raises(ConfigError, match=r"cannot generate with it; serve it by one pool with role: embed"):
        build_engine(spec, spec.pool("decode"), MonotonicClock())
