"""What the transfer leans on inside vLLM and NIXL without a promise from them: a test for each hook.

When vLLM or NIXL moves, these fail first.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

from kvasir.core.errors import ConfigError
from kvasir_workers.connector import stats

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def connector() -> Any:
    pytest.importorskip("vllm")
    from kvasir_workers.connector import connector as module

    return module


def test_every_method_that_we_override_is_still_called_the_same_way(connector: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    bases = {**vars(SupportsHMA), **vars(KVConnectorBase_V1)}
    ours = {n for n, v in vars(connector.KvasirConnector).items() if not n.startswith("_") and callable(v)}
    for name in ours - {"release_leases"}:
        assert name in bases, f"vLLM no longer has {name}"
        mine = list(inspect.signature(getattr(connector.KvasirConnector, name)).parameters)
        theirs = list(inspect.signature(bases[name]).parameters)
        assert mine == theirs, name


def test_nothing_abstract_is_left(connector: Any) -> None:
    assert not connector.KvasirConnector.__abstractmethods__


def test_leases_are_published_before_a_step_computes() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    assert "bind_connector_metadata" in inspect.getsource(ActiveKVConnector.pre_forward)
    step = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert step.index("bind_connector_metadata") < step.index("yield output")


def test_an_engine_with_blocks_on_lease_or_a_lease_to_confirm_keeps_stepping() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "has_pending_push_work" in inspect.getsource(Scheduler.has_requests)
    assert "len(self.requests)" in inspect.getsource(Scheduler.has_finished_requests)


def test_blocks_of_a_request_that_is_aborted_while_it_pulls_stay_until_the_pull_ended() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.finish_requests)
    assert "WAITING_FOR_REMOTE_KVS" in source
    assert "delay_free_blocks" in source


def test_what_we_read_of_requests_and_steps_is_there() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus

    assert 'extra_args.get(\n                    "kv_transfer_params"' in inspect.getsource(Request.__init__)
    assert "num_prompt_tokens" in inspect.getsource(Request.__init__)
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= set(RequestStatus.__members__)
    assert hasattr(KVCacheBlocks, "get_block_ids")
    fields = {
        SchedulerOutput: {"total_num_scheduled_tokens", "kv_connector_metadata"},
        KVConnectorOutput: {"finished_sending", "finished_recving", "kv_connector_worker_meta"},
        KVCacheConfig: {"num_blocks", "kv_cache_groups"},
        FullAttentionSpec: {"block_size", "num_kv_heads", "head_size"},
    }
    for kind, wanted in fields.items():
        assert wanted <= {field.name for field in dataclasses.fields(kind)}, kind


def test_stats_add_up_as_vllm_adds_them(connector: Any) -> None:
    first = connector.TransferStats(data={stats.BYTES_RECEIVED: 5, stats.BLOCKS_LEASED: 9})
    second = connector.TransferStats(data={stats.BYTES_RECEIVED: 6, stats.BLOCKS_LEASED: 2})
    assert not first.is_empty()
    both = connector.KvasirConnector.build_kv_connector_stats(first.to_dict()).aggregate(second)
    assert both.reduce()[stats.BYTES_RECEIVED] == 11
    assert both.reduce()[stats.BLOCKS_LEASED] == 2
    both.reset()
    assert both.is_empty()


def test_kv_that_is_not_made_of_blocks_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from kvasir_workers.connector.kv_memory import regions_of

    shared = torch.zeros(8, 4, 32, 64)
    regions = regions_of({"0": shared, "1": shared, "2": torch.zeros(8, 4, 32, 64)}, 8)
    assert [(r.block_bytes, r.blocks, r.device) for r in regions] == [(4 * 32 * 64 * 4, 8, "cpu")] * 2
    with pytest.raises(ConfigError, match="cannot be moved by blocks"):
        regions_of({"0": torch.zeros(2, 8, 32, 64).transpose(0, 1)}, 8)
    with pytest.raises(ConfigError, match="cannot be moved by blocks"):
        regions_of({"0": torch.zeros(9, 32, 64)}, 8)


_IDLE_AGENT = """
import threading, time
import psutil
from kvasir_workers.transfer.nixl.agent import NixlAgent
agent = NixlAgent("idle", "127.0.0.1")
listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
before, began = time.process_time(), time.monotonic()
threading.Event().wait(2.0)
print((time.process_time() - before) / (time.monotonic() - began), *sorted(listening))
agent.close()
"""


def test_an_idle_agent_takes_next_to_no_cpu_and_listens_on_loopback_only() -> None:
    """The wrapper's own agent takes a whole core: the delay is set on the bindings' configuration."""
    pytest.importorskip("nixl")
    ran = subprocess.run([sys.executable, "-c", _IDLE_AGENT], capture_output=True, text=True, check=True)
    cores, *listening = ran.stdout.split()
    assert float(cores) < 0.05
    assert listening == ["127.0.0.1"]


def test_nixl_still_has_the_delay_and_the_other_settings_that_we_set() -> None:
    nixl = pytest.importorskip("nixl")
    config = nixl._bindings.nixlAgentConfig()
    for name in ("useProgThread", "useListenThread", "pthrDelay", "syncMode"):
        assert hasattr(config, name), name
    config.pthrDelay = 1_000
    assert config.pthrDelay == 1_000
