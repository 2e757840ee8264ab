"""A follower node's use of vLLM's own classes. Imported only after vLLM's environment is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.utils.network_utils import get_tcp_uri
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from kvasir_workers.engines.vllm.runtime import engine_runtime as runtime

platform = runtime.platform


def run_ranks(arguments: Mapping[str, Any]) -> None:
    """Start this node's ranks, and wait until one of them ends; the others then end too. Blocks.

    Raise ValueError for arguments that vLLM rejects, RuntimeError if the ranks did not start.
    """
    config = runtime.engine_args(arguments).create_engine_config(headless=True)
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and parallel.node_rank_within_dp == 0:
        _run_cores(config)
        return
    try:
        executor = MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM raises a bare Exception for an error in a rank
        raise RuntimeError(str(error)) from error
    executor.start_worker_monitor(inline=True)


def _run_cores(config: Any) -> None:
    """Run the engine cores of this node's data-parallel ranks, which connect to the front on the leader."""
    parallel = config.parallel_config
    cores = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        # The worker's loads are sums of all ranks' statistics.
        log_stats=True,
    )
    cores.monitor_engine_liveness()
    ended = cores.finished_procs()
    status = ended.get(cores.failed_proc_name or "", 0)
    if status > 0:
        # As vLLM's front says it of cores on its own node.
        failed = {cores.failed_proc_name: status}
        raise RuntimeError(f"Engine core initialization failed. Failed core proc(s): {failed}")
