"""vLLM's connector for all of Kvasir's KV: hand-offs from prefill to decode, and tiers below the device.

vLLM loads it by name (`kv_connector="KvasirConnector"`, `kv_connector_module_path` of this module) and
creates one in the scheduler and one in each worker. This class only forwards calls: the schedulers of
`handoff` and `tiers` decide, and their workers move data. A request with a hand-off pulls it; other missing
blocks are loaded from tiers, also after a failed pull.
`kv_connector_extra_config` has the fields of settings.Settings.

    PREFILL request   kv_transfer_params = {"offer": {lease_id, fence, ttl_s}}
      its output      {lease_id, fence, ttl_s, blocks, ticket}; with `overlap` and a prompt of several steps
                      also before it, in the statistics of a step (stats.EARLY_HANDOFFS)
    DECODE request    kv_transfer_params = {"pull": {lease_id, fence, ttl_s, blocks, ticket}}
      its output      {transferred_tokens, transferred_blocks, transferred_bytes, transfer_s,
                       failed_tokens, failure}; nothing when it pulled nothing
    any request       kv_transfer_params = {"tier_tokens": n}, to fetch from tiers at once, or
                      {"tiers": False}, to use no tiers
      its output      {tier_tokens, tier_s} more, when it waited for tiers
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from kvasir.core.errors import ConfigError
from kvasir_workers.connector.adapters import make_transfer
from kvasir_workers.connector.handoff.scheduler import HandoffScheduler
from kvasir_workers.connector.handoff.worker import HandoffWorker, RankPlace
from kvasir_workers.connector.kv_group import only_group
from kvasir_workers.connector.kv_memory import layers_of, layout_of, regions_of
from kvasir_workers.connector.layer_slices import slices_of
from kvasir_workers.connector.messages import (
    KvasirTierChanged,
    RankEndpoint,
    RankReport,
    StepMetadata,
    TransferStats,
)
from kvasir_workers.connector.orders import StepOrders, StepReport
from kvasir_workers.connector.request_blocks import progress_of
from kvasir_workers.connector.settings import Settings
from kvasir_workers.connector.tiers.orders import TierOrders
from kvasir_workers.transfer.common.sliced import SlicedTransfer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvasir.ports.transfer import KvTransfer
    from kvasir_workers.connector.tiers.scheduler import TierScheduler
    from kvasir_workers.connector.tiers.worker import TierWorker


class KvasirConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. Raise ConfigError for engines whose KV cannot be moved."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._group = only_group(kv_cache_config)
        self._blocks = kv_cache_config.num_blocks
        self._ranks: int = vllm_config.parallel_config.tensor_parallel_size
        self._stages: int = vllm_config.parallel_config.pipeline_parallel_size
        self._layers: int = vllm_config.model_config.get_total_num_hidden_layers()
        try:
            self._settings = msgspec.convert(
                dict(vllm_config.kv_transfer_config.kv_connector_extra_config), Settings
            )
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from error
        self._endpoint: RankEndpoint | None = None
        self._pool: BlockPool | None = None
        self._scheduler: HandoffScheduler | None = None
        self._worker: HandoffWorker | None = None
        self._tiers: TierScheduler | None = None
        self._tier_worker: TierWorker | None = None
        if role is KVConnectorRole.SCHEDULER and self._settings.transfer:
            self._scheduler = HandoffScheduler(
                self._group.block_size, self._settings.lease_s, overlap=self._settings.overlap
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A tier that misses a block loses nothing; a hand-off needs all ranks."""
        return bool(self._settings.transfer) and bool(super().requires_kv_delivery)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once, after vLLM allocated its KV cache."""
        regions = regions_of(kv_caches, self._blocks)
        layout = layout_of(kv_caches, regions, self._group, self._ranks)
        rank, stage, endpoint = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group, ""
        if self._settings.transfer:
            settings = self._settings
            transfer = self._transfer(kv_caches)
            whole = self._group.whole
            endpoint = transfer.register(regions, layout.of_whole_ranks() if whole else layout)
            self._worker = HandoffWorker(
                transfer,
                place=RankPlace(rank, self._ranks, stage, self._stages, self._layers, whole),
                timeout_s=settings.timeout_s,
                pause=time.sleep,
            )
        if self._settings.tiers is not None:
            # Imported only by engines with tiers, because it lengthens the start.
            from kvasir_workers.connector.tiers.setup import make_tier_worker

            self._tier_worker = make_tier_worker(kv_caches, regions, stage * self._ranks + rank)
        self._endpoint = RankEndpoint(endpoint, layout)

    def get_handshake_metadata(self) -> RankEndpoint | None:
        """Return this rank's part of every ticket, and its KV layout."""
        return self._endpoint

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Save blocks before this step overwrites them."""
        if self._tier_worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._tier_worker.before_forward(kv_connector_metadata.orders.tiers or TierOrders())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Publish leases: vLLM calls this before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.lease(self._orders())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's pulls and loads."""
        orders = self._orders()
        if self._worker is not None:
            self._worker.pull(orders.pulls)
        if self._tier_worker is not None and orders.tiers is not None:
            self._tier_worker.load(orders.tiers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: KV is read in place."""

    def wait_for_save(self) -> None:
        """Start to store the step's full blocks. A later overwrite waits for the stores."""
        orders = self._orders()
        if self._tier_worker is not None and orders.tiers is not None:
            self._tier_worker.after_forward(orders.tiers)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose leases ended, and requests whose pulls and loads ended or failed."""
        results = KVConnectorTransferResults()
        idle = self._orders().idle
        if self._tier_worker is not None:
            results.finished_recving |= self._tier_worker.poll(idle and self._worker is None)
        if self._worker is not None:
            sent, received = self._worker.poll(idle and not results.finished_recving)
            results.finished_sending |= sent
            results.finished_recving |= received
            results.failed_recving |= self._worker.take_failed()
        return results

    def build_connector_worker_meta(self) -> RankReport | None:
        """Return what this step moved."""
        report = None if self._worker is None else self._worker.take_report()
        tiers = None if self._tier_worker is None else self._tier_worker.take_report()
        if tiers:
            report = report or StepReport()
            report.tiers = tiers
        return None if report is None else RankReport(report)

    def release_leases(self, lease_ids: Iterable[str]) -> None:
        """Release offered KV that will not be pulled; the blocks are free after the next step."""
        if self._worker is not None:
            self._worker.release(lease_ids)

    def shutdown(self) -> None:
        """Close transfer and tiers."""
        if self._worker is not None:
            self._worker.close()
        if self._tiers is not None:
            self._tiers.close()

    # Scheduler half

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Store the endpoint and layout of every rank, by pipeline stage and tensor-parallel rank; called
        once, before the first request."""
        ordered = [each for _, each in sorted(metadata.items()) if isinstance(each, RankEndpoint)]
        if self._scheduler is not None:
            self._scheduler.set_endpoints([each.endpoint for each in ordered], self._stages)
        if self._settings.tiers is not None and ordered:
            from kvasir_workers.connector.tiers.setup import make_tier_scheduler

            self._tiers = make_tier_scheduler(
                self._settings,
                self._vllm_config,
                [each.layout for each in ordered],
                window=self._group.window,
                on_device=self._on_device,
            )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep the device's prefix cache for lookups."""
        self._pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        """Handle a request that was queued."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)
        if self._tiers is not None:
            self._tiers.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens to pull, or to load; the request is parked until they have arrived. None
        while tiers are being queried."""
        if self._scheduler is not None:
            tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
            if tokens > 0:
                return tokens, True
        found = 0 if self._tiers is None else self._tiers.matched_tokens(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record the target blocks of the pull or load."""
        ids = blocks.get_block_ids()[0]
        loaded = self._tiers is not None and self._tiers.allocated(request, ids, num_external_tokens)
        if self._scheduler is not None:
            self._scheduler.allocated(request, ids, 0 if loaded else num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return this step's orders."""
        idle = scheduler_output.total_num_scheduled_tokens == 0
        preempted = scheduler_output.preempted_req_ids or ()
        orders = StepOrders(idle=idle)
        if self._scheduler is not None:
            orders = self._scheduler.take_orders(progress_of(scheduler_output), preempted, idle=idle)
        if self._tiers is not None:
            kept = self._tiers.take_orders(progress_of(scheduler_output), preempted, idle=idle)
            orders = replace(orders, tiers=kept)
        return StepMetadata(orders)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the KV of a prefilled request; return the transfer fields of its output."""
        completed = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        pinned, moved = False, None
        if self._scheduler is not None:
            pinned, moved = self._scheduler.finished(request, block_ids[0], completed)
        loaded = None if self._tiers is None else self._tiers.finished(request)
        return pinned, {**(moved or {}), **(loaded or {})} or None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the step's report."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, RankReport) else None
        received = set(connector_output.finished_recving or ())
        if self._tiers is not None:
            received = received - self._tiers.update((report or StepReport()).tiers, received)
        if self._scheduler is not None:
            self._scheduler.update(report, connector_output.finished_sending or (), received)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the changes of tiers."""
        return [] if self._tiers is None else [KvasirTierChanged(log=log) for log in self._tiers.take_logs()]

    def reset_cache(self) -> bool:
        """Announce the complete contents of tiers to subscribers that restart."""
        if self._tiers is not None:
            self._tiers.announce()
        return True

    def has_pending_push_work(self) -> bool:
        """Return whether an engine without requests must keep stepping, until senders can free blocks and
        routers have received the tiers' changes."""
        return (self._scheduler is not None and self._scheduler.has_pending_work()) or (
            self._tiers is not None and self._tiers.has_pending_work()
        )

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return statistics since the last step; from the scheduler half, which sees every rank."""
        moved = None if self._scheduler is None else self._scheduler.take_stats()
        kept = None if self._tiers is None else self._tiers.take_stats()
        if moved is None and kept is None:
            return None
        return TransferStats(data={**(moved or {}), **(kept or {})})

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return a layout with heads outermost within a block if ranks of another number read it, else None
        for vLLM's choice."""
        config, model = vllm_config.kv_transfer_config, vllm_config.model_config
        # A latent has no heads.
        divided = model is None or not model.use_mla
        return "HND" if divided and config and config.kv_connector_extra_config.get("head_major") else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats | None:
        """Return statistics for vLLM's loggers."""
        return TransferStats(data=data or {})

    def _transfer(self, kv_caches: Mapping[str, torch.Tensor]) -> KvTransfer:
        settings = self._settings

        def make() -> KvTransfer:
            return make_transfer(
                settings.transfer, settings.host, settings.checksum_parts, ucx_tcp=settings.ucx_tcp
            )

        if not settings.stages:
            return make()
        return SlicedTransfer(slices_of(layers_of(kv_caches), self._layers, settings.stages), make)

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, StepMetadata) else StepOrders()

    def _on_device(self, key: bytes) -> bool:
        return self._pool is not None and self._pool.get_cached_block(key, [0]) is not None
