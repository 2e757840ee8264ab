"""The engine's load, from the statistics that vLLM passes to its loggers after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from kvasir.core.requests import EngineLoad
from kvasir_workers.connector.stats import EARLY_HANDOFFS, TransferTotals, all_ranks


@dataclass(slots=True)
class _Rank:
    """The reports of one data-parallel rank: its latest gauges and the sums of its counters."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    speculated: int = 0
    accepted: int = 0
    moved: TransferTotals = field(default_factory=TransferTotals)

    def add(self, stats: Any) -> None:
        """Add one step's vllm.v1.metrics.stats.SchedulerStats."""
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.kv_usage = stats.kv_cache_usage
        if (prefix := stats.prefix_cache_stats) is not None:
            self.prefix_queries += prefix.queries
            self.prefix_hits += prefix.hits
        if (speculation := stats.spec_decoding_stats) is not None:
            self.speculated += speculation.num_draft_tokens
            self.accepted += speculation.num_accepted_tokens
        if stats.kv_connector_stats:
            self.moved.add(stats.kv_connector_stats)


def _unobserved(_handoff: Mapping[str, Any]) -> None:
    """Ignore the hand-off."""


class LoadRecorder(PrometheusStatLogger):  # type: ignore[misc]  # vLLM ships no type information here
    """Keeps an EngineLoad instead of exporting metrics, and calls `on_early_handoff` for KV that is offered
    before its prompt is computed.

    It derives from vLLM's Prometheus logger and overrides all of it, because vLLM otherwise adds a Prometheus
    logger of its own, which costs more per step than the step's tokens.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._ranks = {index: _Rank() for index in engine_indexes or [0]}
        self.on_early_handoff: Callable[[Mapping[str, Any]], None] = _unobserved

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM on the event loop, once per step and rank, after that step's outputs."""
        rank = self._ranks[engine_idx]
        if iteration_stats is not None:
            rank.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            rank.add(scheduler_stats)
            if moved := scheduler_stats.kv_connector_stats:
                for handoff in moved.get(EARLY_HANDOFFS, {}).values():
                    self.on_early_handoff(handoff)

    def newest(self, *, kv_blocks_total: int, idle: bool) -> EngineLoad:
        """Return the load after the last step. `idle`: no request is left, which vLLM does not report if a
        stop string or an abort ended the last one, since no step follows."""
        ranks = self._ranks.values()
        return EngineLoad(
            running=0 if idle else sum(rank.running for rank in ranks),
            waiting=0 if idle else sum(rank.waiting for rank in ranks),
            kv_usage=0.0 if idle else sum(rank.kv_usage for rank in ranks) / len(ranks),
            kv_blocks_total=kv_blocks_total,
            kv_blocks_leased=sum(rank.moved.blocks_leased for rank in ranks),
            prefix_queries_tokens=sum(rank.prefix_queries for rank in ranks),
            prefix_hits_tokens=sum(rank.prefix_hits for rank in ranks),
            transfer_bytes_received=sum(rank.moved.bytes_received for rank in ranks),
            transfers_received=sum(rank.moved.transfers_received for rank in ranks),
            transfers_failed=sum(rank.moved.transfers_failed for rank in ranks),
            transfer_peers_refused=sum(rank.moved.transfer_peers_refused for rank in ranks),
            preemptions=sum(rank.preemptions for rank in ranks),
            speculated_tokens=sum(rank.speculated for rank in ranks),
            accepted_tokens=sum(rank.accepted for rank in ranks),
            swapped_in=sum(rank.moved.swapped_in for rank in ranks),
            recomputed=sum(rank.moved.recomputed for rank in ranks),
            tiers=all_ranks(tier for rank in ranks for tier in rank.moved.tiers),
        )

    def reset(self) -> None:
        """Clear the counters after the warm-up, which uses no tiers; their contents may be from before."""
        self._ranks = {
            index: _Rank(moved=TransferTotals(tiers=rank.moved.tiers)) for index, rank in self._ranks.items()
        }

    def log_engine_initialized(self) -> None:
        """Does nothing: metrics are not exported."""

    def log(self) -> None:
        """Does nothing: metrics are not exported."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Does nothing: engines do not sleep here."""

    def record_admission_rejection(self, reason: str) -> None:
        """Does nothing: vLLM's queue limits are off, since the router admits requests."""
