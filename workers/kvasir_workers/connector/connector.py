"""vLLM's connector for Kvasir's hand-off: prefill here, decode there, the KV pulled in between.

vLLM loads it by name (`kv_connector="KvasirConnector"`, `kv_connector_module_path` of this module) and
makes one in the scheduler and one in each worker. This class is only the seam: decisions are in
handoff_scheduler.py, movement in handoff_worker.py. `kv_connector_extra_config` holds the fields of Settings.

    PREFILL request   kv_transfer_params = {"offer": {lease_id, fence, ttl_s}}
      its output      {lease_id, fence, ttl_s, blocks, ticket}
    DECODE request    kv_transfer_params = {"pull": {lease_id, fence, ttl_s, blocks, ticket}}
      its output      {transferred_tokens, transferred_blocks, transferred_bytes, transfer_s,
                       failed_tokens, failure}; nothing when it pulled nothing
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from kvasir.core.errors import ConfigError
from kvasir.ports.transfer import KvTransfer
from kvasir_workers.connector import stats
from kvasir_workers.connector.handoff_scheduler import HandoffScheduler
from kvasir_workers.connector.handoff_worker import HandoffWorker
from kvasir_workers.connector.kv_memory import layout_of, regions_of
from kvasir_workers.connector.orders import StepOrders, StepReport
from kvasir_workers.transfer.nixl.adapter import NixlTransfer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class Settings(msgspec.Struct, frozen=True):
    """`kv_connector_extra_config`. `lease_s` bounds every lease; `timeout_s` every pull."""

    transfer: str
    host: str = "127.0.0.1"
    lease_s: float = 20.0
    timeout_s: float = 5.0


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, on their way to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One step's report, on its way to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Both ranks' reports as one."""
        if isinstance(other, RankReport):
            self.report.merge(other.report)
        return self


class RankEndpoint(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where one rank's agent is reached, on its way to the scheduler."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Transfer figures of some steps, keyed as in stats.py."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Counters add up; the newer level stays."""
        for name in stats.COUNTERS:
            self.data[name] = self.data.get(name, 0) + other.data.get(name, 0)
        self.data.update({k: v for k, v in other.data.items() if k not in stats.COUNTERS})
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class KvasirConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. Raises ConfigError for engines whose KV it cannot move."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._spec = _only_group(kv_cache_config)
        self._blocks = kv_cache_config.num_blocks
        self._ranks: int = vllm_config.parallel_config.tensor_parallel_size
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError("KV transfer between engines with pipeline parallelism is not supported")
        try:
            self._settings = msgspec.convert(
                dict(vllm_config.kv_transfer_config.kv_connector_extra_config), Settings
            )
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from error
        self._endpoint: str | None = None
        self._scheduler: HandoffScheduler | None = None
        self._worker: HandoffWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = HandoffScheduler(self._spec.block_size, self._settings.lease_s)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Once, after vLLM allocated its KV cache."""
        transfer = self._make_transfer()
        regions = regions_of(kv_caches, self._blocks)
        self._endpoint = transfer.register(regions, layout_of(kv_caches, regions, self._spec, self._ranks))
        self._worker = HandoffWorker(
            transfer,
            rank=get_tensor_model_parallel_rank(),
            ranks=self._ranks,
            timeout_s=self._settings.timeout_s,
            pause=time.sleep,
        )

    def get_handshake_metadata(self) -> RankEndpoint | None:
        """This rank's part of every ticket."""
        return None if self._endpoint is None else RankEndpoint(self._endpoint)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Runs before the forward, and so are leases published."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.offer(self._orders().offers)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's pulls."""
        if self._worker is not None:
            self._worker.pull(self._orders().pulls)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """KV is read in place."""

    def wait_for_save(self) -> None:
        """KV is read in place."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose leases ended, and requests whose pulls ended."""
        if self._worker is None:
            return None, None
        sent, received = self._worker.poll(self._orders().idle)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that failed pulls should have filled."""
        return set() if self._worker is None else self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> RankReport | None:
        """What was moved in this step."""
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else RankReport(report)

    def release_leases(self, lease_ids: Iterable[str]) -> None:
        """Free KV that was offered and will not be pulled; the blocks are free after the next step."""
        if self._worker is not None:
            self._worker.release(lease_ids)

    def shutdown(self) -> None:
        """End everything."""
        if self._worker is not None:
            self._worker.close()

    # Scheduler half

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Every rank's endpoint, once, before the first request."""
        if self._scheduler is not None:
            ordered = [metadata[rank] for rank in sorted(metadata)]
            self._scheduler.set_endpoints([m.endpoint for m in ordered if isinstance(m, RankEndpoint)])

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to pull; the request is parked until they are here."""
        tokens = self._scheduling().matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The pull's targets are known."""
        self._scheduling().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's orders."""
        return StepMetadata(self._scheduling().take_orders(scheduler_output.total_num_scheduled_tokens == 0))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the KV of a prefilled request."""
        completed = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        return self._scheduling().finished(request, block_ids[0], completed)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The step's report."""
        meta = connector_output.kv_connector_worker_meta
        self._scheduling().update(
            meta.report if isinstance(meta, RankReport) else None,
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
        )

    def has_pending_push_work(self) -> bool:
        """Keeps an engine without requests stepping until senders know that they can free blocks."""
        return self._scheduling().has_pending_work()

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Figures since the last step; of the scheduler half, which sees every rank."""
        report = None if self._scheduler is None else self._scheduler.take_stats()
        return None if report is None else TransferStats(data=report)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats | None:
        """For vLLM's loggers."""
        return TransferStats(data=data or {})

    def _scheduling(self) -> HandoffScheduler:
        if self._scheduler is None:
            raise RuntimeError("a scheduler call reached the worker half of the connector")
        return self._scheduler

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, StepMetadata) else StepOrders()

    def _make_transfer(self) -> KvTransfer:
        if self._settings.transfer == "nixl":
            return NixlTransfer(f"kvasir-{uuid.uuid4().hex}", self._settings.host, time.monotonic)
        raise ConfigError(f"transfer: {self._settings.transfer!r} is not one of: nixl")


def _only_group(kv_cache_config: KVCacheConfig) -> Any:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise ConfigError(f"KV transfer needs a model of full attention alone; its KV groups are: {kinds}")
    return specs[0]
