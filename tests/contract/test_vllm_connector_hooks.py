"""Internals of vLLM and NIXL that the transfer depends on without a guarantee: one test per hook.

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
from kvasir_workers.connector.orders import StepReport
from kvasir_workers.connector.tiers.orders import TierReport

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
    for name in ours - {"release_leases", "requires_kv_delivery"}:
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


def test_a_step_reports_what_every_stage_stored_and_a_load_once_all_of_them_have_it(connector: Any) -> None:
    from vllm.config import ParallelConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvasir_workers.connector.messages import RankReport

    def output(stored: dict[int, int], loaded: set[str]) -> Any:
        """What a stage before the last one returns."""
        report = StepReport(tiers=TierReport(stored=stored))
        moved = KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=RankReport(report))
        return ModelRunnerOutput.with_kv_conn_output_only(moved)

    step = KVOutputAggregator(2)
    first = step.aggregate([output({1: 1}, {"r"}), output({1: 1}, set())], output_rank=1)
    assert first.kv_connector_output.kv_connector_worker_meta.report.tiers.stored == {1: 2}
    assert not first.kv_connector_output.finished_recving
    second = step.aggregate([output({}, set()), output({2: 1}, {"r"})], output_rank=1)
    assert second.kv_connector_output.finished_recving == {"r"}
    assert ParallelConfig(tensor_parallel_size=2).nnodes_within_dp == 1


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


def test_an_idle_agent_takes_next_to_no_cpu_and_listens_nowhere() -> None:
    """The wrapper's own agent takes a whole core: the delay is set on the bindings' configuration."""
    pytest.importorskip("nixl")
    ran = subprocess.run([sys.executable, "-c", _IDLE_AGENT], capture_output=True, text=True, check=True)
    cores, *listening = ran.stdout.split()
    assert float(cores) < 0.05
    assert listening == []


def test_nixl_still_has_the_delay_and_the_other_settings_that_we_set() -> None:
    nixl = pytest.importorskip("nixl")
    config = nixl._bindings.nixlAgentConfig()
    for name in ("useProgThread", "useListenThread", "pthrDelay", "syncMode"):
        assert hasattr(config, name), name
    config.pthrDelay = 1_000
    assert config.pthrDelay == 1_000


def test_a_request_that_waits_for_tiers_is_passed_over_and_asked_again() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.scheduler import Scheduler

    step = inspect.getsource(Scheduler.schedule)
    asked = step.index("self.connector.get_num_new_matched_tokens(")
    passed = step.index("if ext_tokens is None:", asked)
    assert "skip_request(request_queue)" in step[passed : passed + 500]


def test_a_request_whose_pull_failed_is_asked_for_anew() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "request.num_computed_tokens = 0" in inspect.getsource(Scheduler._handle_failed_recving)
    back = inspect.getsource(Scheduler._update_waiting_for_remote_kv)
    assert "self.kv_cache_manager.free(request)" in back
    step = inspect.getsource(Scheduler.schedule)
    assert step.index("if request.num_computed_tokens == 0:") < step.index("get_num_new_matched_tokens(")


def test_blocks_are_saved_before_they_are_overwritten_and_after_they_are_filled() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    run = inspect.getsource(GPUModelRunner.execute_model)
    assert run.index("handle_preemptions") < run.index("self._update_states(")
    assert "handle_preemptions" in inspect.getsource(ActiveKVConnector.pre_forward)
    step = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert step.index("yield output") < step.index("wait_for_save()") < step.index("get_transfer_results")


def test_who_was_preempted_and_what_blocks_requests_have_is_said_before_orders_are_made() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "preempted_req_ids=self.reset_preempted_req_ids" in inspect.getsource(Scheduler.schedule)
    assert "reset_preempted_req_ids.add" in inspect.getsource(Scheduler._preempt_request)
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {"preempted_req_ids", "kv_connector_block_state", "num_scheduled_tokens"} <= fields
    assert "resolve_block_ids" in {field.name for field in dataclasses.fields(KVConnectorBlockState)}


def test_what_tiers_read_of_requests_and_of_the_device_s_cache_is_there() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    made = inspect.getsource(Request.__init__)
    for name in ("block_hashes", "all_token_ids", "num_preemptions", "cache_salt", "lora_request"):
        assert f"self.{name}" in made, name
    assert "skip_reading_prefix_cache" in made
    assert list(inspect.signature(BlockPool.get_cached_block).parameters)[1:] == [
        "block_hash",
        "kv_cache_group_ids",
    ]


def test_a_reset_of_the_cache_reaches_the_connector() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM

    assert "reset_connector" in inspect.signature(AsyncLLM.reset_prefix_cache).parameters
    assert "self.connector.reset_cache()" in inspect.getsource(Scheduler.reset_connector_cache)


def test_changes_of_tiers_are_published_as_the_worker_reads_them(connector: Any) -> None:
    import msgspec
    from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvasir.core.kv import KvEventKind, Medium
    from kvasir.native import Shadow
    from kvasir.ports.tier import TierBlock, TierChange
    from kvasir_workers.tiers.changes import ChangeLog

    assert "self.connector.take_events()" in inspect.getsource(Scheduler.update_from_output)
    changes = ChangeLog()
    changes.add(Medium.DISK, TierChange(stored=(TierBlock(b"k" * 32, 5, 4), TierBlock(b"l" * 32, 6, 5))))
    (log,) = changes.take(9)
    events = [AllBlocksCleared(), connector.KvasirTierChanged(log=log)]
    payload = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events, data_parallel_rank=0))
    assert msgspec.msgpack.decode(payload)[1][1] == {"type": "KvasirTierChanged", "log": log}
    shadow = Shadow(1, lambda salt, adapter: 0)
    shadow.ingest(0, payload)
    assert shadow.held(0, Medium.DISK) == 2
    assert log[0] == KvEventKind.STORED


# Without collections and an orderly end, which take half of what a process that imports vLLM takes.
_HASHES = """
import gc, os
gc.disable()
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
function = get_hash_fn_by_name("sha256_cbor")
init_none_hash(function)
request = Request("r", list(range(96)), SamplingParams(), None, cache_salt="s",
                  block_hasher=get_request_block_hasher(32, function))
print(*(bytes(key).hex() for key in request.block_hashes), flush=True)
os._exit(0)
"""


def test_a_block_has_the_same_key_in_every_process() -> None:
    pytest.importorskip("vllm")
    runs = [
        subprocess.run([sys.executable, "-c", _HASHES], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    keys = [ran.stdout.split()[-3:] for ran in runs]
    assert keys[0] == keys[1]
    assert {len(key) for key in keys[0]} == {64}
