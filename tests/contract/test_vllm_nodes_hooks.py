"""Internals of vLLM that an engine over several nodes depends on: one test per hook.

vLLM starts such an engine from its command line only; follower_runtime.py does what that does.
"""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.signing.signed_tcp import signing_variables
from kvasir_workers.engines.vllm.follower import follower_arguments

pytestmark = pytest.mark.slow

SECOND = NodePlace(1, "127.0.0.2", "127.0.0.1", 4000, 4001)


@pytest.fixture
def config(runtime: Any) -> Any:
    """vLLM's, of the second of two nodes."""
    engine = EngineSpec(tensor_parallel_size=2, nodes=2, threads=1)
    pool = PoolSpec(name="both", role=Role.BOTH, engine=engine)
    spec = Deployment(model=ModelSpec(max_model_len=512), disaggregation="never", pools=(pool,))
    folder = str(resolve_model("kvasir-tiny"))
    made = follower_arguments(spec, pool, model_path=folder, platform="cpu", place=SECOND)
    return runtime.engine_args(made).create_engine_config(headless=True)


def test_a_node_has_its_part_of_the_ranks_and_follows_the_first(config: Any) -> None:
    parallel = config.parallel_config
    assert (parallel.nnodes, parallel.node_rank) == (2, 1), "worker_extension.py tells nodes apart by these"
    assert (parallel.local_world_size, parallel.node_rank_within_dp) == (1, 1)
    assert (parallel.master_addr, parallel.master_port) == ("127.0.0.1", 4000)
    assert parallel.distributed_executor_backend == "mp", "other executors have no nodes"


def test_the_executor_runs_without_an_engine_above_it_and_tells_when_a_rank_ends(runtime: Any) -> None:
    from vllm.entrypoints.cli import serve
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    def takes(method: Any) -> set[str]:
        return set(inspect.signature(method).parameters)

    assert "monitor_workers" in takes(MultiprocExecutor.__init__)
    assert "inline" in takes(MultiprocExecutor.start_worker_monitor)
    headless = inspect.getsource(serve.run_headless)
    for line in (
        "MultiprocExecutor(vllm_config, monitor_workers=False)",
        "executor.start_worker_monitor(inline=True)",
    ):
        assert line in headless, "vLLM starts a further node in another way; see follower_runtime.py"


def test_ranks_meet_where_the_environment_says_that_a_node_is(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils.network_utils import get_ip
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    assert get_ip() == "127.0.0.2"
    assert "mq_connect_ip = get_ip()" in inspect.getsource(multiproc_executor)


def test_the_worker_knows_which_node_it_is_on(runtime: Any) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    assert "self.parallel_config = " in inspect.getsource(WorkerBase.__init__), (
        "worker_extension.py:kvasir_leave_with reads `parallel_config.node_rank`"
    )


def test_torch_and_zeromq_connect_through_functions_that_a_library_before_them_replaces() -> None:
    torch, zmq = pytest.importorskip("torch"), pytest.importorskip("zmq")
    libraries = Path(torch.__file__).parent / "lib", Path(zmq.__file__).parents[1] / "pyzmq.libs"
    of_torch, of_zmq = libraries[0] / "libtorch_cpu.so", next(libraries[1].glob("libzmq*"))
    for library in (of_torch, of_zmq):
        listed = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
        names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
        assert {"listen", "connect"} <= names, f"signed_tcp.c cannot sign sockets of {library.name}"


def test_vllm_spawns_its_processes_where_a_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.system_utils import get_mp_context

    variables = signing_variables("k", {})
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", variables["VLLM_WORKER_MULTIPROC_METHOD"])
    assert get_mp_context().get_start_method() == "spawn", "a forked process would not load the library"
