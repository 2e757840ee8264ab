"""What vLLM makes of a pool's parallel sizes, on each node, up to where it would start ranks.

vLLM's CPU build knows the options of GPUs, and refuses some by a look at its platform: only that look is
replaced here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from kvasir.config.checks.all2all import ALL2ALL_BACKENDS, WITH_MICROBATCHES, WITHOUT_BALANCING
from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir.sizing.shape import stages
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments

pytestmark = pytest.mark.slow

REMOVED = {"naive", "pplx"}
RENAMED = {"flashinfer_all2allv"}
NOT_CHOSEN = {"passthrough"}
"""vLLM chooses it by `moe_backend`."""
EXPERTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}


class _Gpus:
    """vLLM's platform, which says of itself that it is CUDA."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with 64 experts in a layer."""
    folder = tmp_path_factory.mktemp("experts")
    for file in resolve_model("kvasir-tiny").glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | EXPERTS))
    return str(folder)


def parallel_configs(runtime: Any, model: str, monkeypatch: pytest.MonkeyPatch, **engine: Any) -> list[Any]:
    """Return vLLM's ParallelConfig on each node of an engine."""
    from vllm.config import parallel

    monkeypatch.setattr(parallel, "current_platform", _Gpus(parallel.current_platform))
    spec = EngineSpec(**engine)
    pool = PoolSpec(name="wide", role=Role.BOTH, engine=spec)
    deployment = Deployment(model=ModelSpec(max_model_len=256), disaggregation="never", pools=(pool,))
    found = []
    for rank in range(spec.nodes):
        place = NodePlace(rank, f"127.0.0.{rank + 1}", "127.0.0.1", 4000, 4001)
        made = engine_arguments(
            deployment, pool, model_path=model, platform="cpu", place=place if spec.nodes > 1 else None
        )
        config = runtime.engine_args(made).create_engine_config(headless=rank > 0)
        found.append(config.parallel_config)
    return found


LAYOUTS: dict[str, tuple[dict[str, Any], list[tuple[int, int, int, int]]]] = {
    # On each node: its first data-parallel rank, how many it has, the node within that rank, and how many
    # ranks of that data-parallel rank it runs.
    "TP 8 on 2 nodes": ({"tensor_parallel_size": 8, "nodes": 2}, [(0, 1, 0, 4), (0, 1, 1, 4)]),
    "TP 8 x PP 2 on 2 nodes": (
        {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nodes": 2},
        [(0, 1, 0, 8), (0, 1, 1, 8)],
    ),
    "DP 16, EP, on 2 nodes": (
        {"data_parallel_size": 16, "expert_parallel": True, "nodes": 2},
        [(0, 8, 0, 1), (8, 8, 0, 1)],
    ),
    "TP 2 x DP 8, EP, on 2 nodes": (
        {"tensor_parallel_size": 2, "data_parallel_size": 8, "expert_parallel": True, "nodes": 2},
        [(0, 4, 0, 2), (4, 4, 0, 2)],
    ),
    "TP 4 x PP 2 x DP 2, EP, on 2 nodes": (
        {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 2,
            "expert_parallel": True,
            "nodes": 2,
        },
        [(0, 1, 0, 8), (1, 1, 0, 8)],
    ),
    "TP 16 x DP 2, EP, on 4 nodes": (
        {"tensor_parallel_size": 16, "data_parallel_size": 2, "expert_parallel": True, "nodes": 4},
        [(0, 1, 0, 8), (0, 1, 1, 8), (1, 1, 0, 8), (1, 1, 1, 8)],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_node_has_its_ranks(
    name: str, runtime: Any, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, expected = LAYOUTS[name]
    parallels = parallel_configs(runtime, experts, monkeypatch, kv_events=False, **engine)
    spec = EngineSpec(kv_events=False, **engine)
    assert [
        (p.data_parallel_rank, p.data_parallel_size_local, p.node_rank_within_dp, p.local_world_size)
        for p in parallels
    ] == expected
    for parallel in parallels:
        assert parallel.world_size_across_dp == spec.ranks
        assert parallel.distributed_executor_backend == "mp"
        assert parallel.enable_expert_parallel is spec.expert_parallel
        assert (parallel.master_addr, parallel.master_port) == ("127.0.0.1", 4000)
        # The front on the first node has the ranks of all nodes.
        assert not parallel.local_engines_only
        assert parallel.data_parallel_master_ip == "127.0.0.1"
        assert spec.data_parallel_size == 1 or parallel.data_parallel_rpc_port == 4001
    hashes = {parallel.compute_hash() for parallel in parallels}
    assert len(hashes) == 1, "vLLM refuses nodes that differ in what they compute"


def test_wide_expert_parallelism_is_what_the_spec_says(
    runtime: Any, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms.cpu import CpuPlatform

    # It would turn off what CPUs cannot do.
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", lambda *_: None)
    for parallel in parallel_configs(
        runtime,
        experts,
        monkeypatch,
        data_parallel_size=16,
        nodes=2,
        kv_events=False,
        expert_parallel=True,
        all2all_backend="deepep_low_latency",
        eplb={"redundant_experts": 32, "window_steps": 500, "interval_steps": 1000},
        dual_batch_overlap=True,
    ):
        assert parallel.all2all_backend == "deepep_low_latency"
        assert parallel.enable_eplb
        balancing = parallel.eplb_config
        assert (balancing.num_redundant_experts, balancing.window_size, balancing.step_interval) == (
            32,
            500,
            1000,
        )
        assert parallel.use_ubatching
        assert parallel.use_all2all


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
def test_vllm_takes_each_backend(
    backend: str, runtime: Any, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"data_parallel_size": 2, "expert_parallel": True, "all2all_backend": backend}
    (parallel,) = parallel_configs(runtime, experts, monkeypatch, **engine)
    assert parallel.all2all_backend == backend


def test_the_backends_are_those_of_the_installed_vllm() -> None:
    from vllm.config.parallel import All2AllBackend

    assert set(ALL2ALL_BACKENDS) == set(get_args(All2AllBackend)) - REMOVED - RENAMED - NOT_CHOSEN


def test_kernels_are_the_modules_for_which_vllm_looks() -> None:
    import inspect

    from vllm.distributed.device_communicators import all2all
    from vllm.utils import import_utils

    looked = inspect.getsource(all2all) + inspect.getsource(import_utils)
    for module in ("deep_ep", "mori", "moonep", "nixl_ep"):
        assert f'_has_module("{module}")' in looked
    assert "from flashinfer.comm" in looked


def test_limits_of_backends_are_those_that_vllm_asserts() -> None:
    import inspect

    from vllm.config import vllm as config

    source = inspect.getsource(config)
    for backend in WITH_MICROBATCHES:
        assert f'"{backend}",' in source.partition("if self.parallel_config.use_ubatching:")[2][:400]
    for backend in WITHOUT_BALANCING:
        assert f"The {backend} all2all backend does not support EPLB" in source


def test_cores_of_a_further_node_are_started_as_vllm_starts_them(runtime: Any) -> None:
    import inspect

    from vllm.entrypoints.cli import serve
    from vllm.v1.engine.utils import CoreEngineProcManager

    assert "node_rank_within_dp > 0" in inspect.getsource(serve.run_headless)
    called = inspect.getsource(serve.run_headless).partition("CoreEngineProcManager(")[2].partition(")\n")[0]
    names = {line.partition("=")[0].strip() for line in called.splitlines() if "=" in line}
    assert names == {
        "local_engine_count",
        "start_index",
        "local_start_index",
        "vllm_config",
        "local_client",
        "handshake_address",
        "executor_class",
        "log_stats",
    }, "see follower_runtime.py"
    for method in ("monitor_engine_liveness", "finished_procs"):
        assert callable(getattr(CoreEngineProcManager, method))


@pytest.mark.parametrize("layers", [4, 5, 32, 61])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_stages_have_the_layers_that_vllm_gives_them(layers: int, size: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    theirs = [range(*get_pp_indices(layers, stage, size)) for stage in range(size)]
    assert list(stages(layers, size)) == theirs


def test_the_scheduler_gets_the_agents_of_every_stage() -> None:
    import inspect

    from vllm.v1.engine import core
    from vllm.v1.worker.gpu_worker import Worker

    assert "set_xfer_handshake_metadata_pp_aware(content)" in inspect.getsource(core)
    source = inspect.getsource(Worker.get_kv_connector_handshake_metadata)
    assert "return {(pp_rank, tp_rank): metadata}" in source


@pytest.fixture(autouse=True)
def _folder_of_weights_is_not_read(experts: str) -> None:
    assert not list(Path(experts).glob("*.safetensors"))
