"""A follower node's use of vLLM's own classes. Imported only after vLLM's environment is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from kvasir_workers.engines.vllm.runtime import engine_runtime as runtime

platform = runtime.platform


def run_ranks(arguments: Mapping[str, Any]) -> None:
    """Start this node's ranks, and wait until one of them ends; the others then end too. Blocks.

    Raise ValueError for arguments that vLLM rejects, RuntimeError if the ranks did not start.
    """
    config = runtime.engine_args(arguments).create_engine_config(headless=True)
    try:
        executor = MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM raises a bare Exception for an error in a rank
        raise RuntimeError(str(error)) from error
    executor.start_worker_monitor(inline=True)
