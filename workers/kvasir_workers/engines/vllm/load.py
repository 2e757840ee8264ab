"""The engine's load, read from the statistics that vLLM hands to its loggers after every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from kvasir.core.requests import EngineLoad
from kvasir_workers.transfer.stats import TransferTotals


@dataclass(slots=True)
class _Rank:
    """What one data-parallel rank reported last."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    moved: TransferTotals = field(default_factory=TransferTotals)


class LoadRecorder(PrometheusStatLogger):  # type: ignore[misc]  # vLLM ships no type information here
    """Keeps an EngineLoad instead of exporting metrics.

    It derives from vLLM's Prometheus logger and overrides all of it, because vLLM adds a Prometheus
    logger of its own unless it is given one, and that one costs more per step than the step's tokens.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._ranks = {index: _Rank() for index in engine_indexes or [0]}
        self._counted = EngineLoad()
        self._newest = EngineLoad()

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM on the event loop, once per step and rank, after that step's outputs."""
        counted = self._counted
        if iteration_stats is not None and iteration_stats.num_preempted_reqs:
            counted = replace(counted, preemptions=counted.preemptions + iteration_stats.num_preempted_reqs)
        if scheduler_stats is not None:
            counted = _count(counted, scheduler_stats)
            rank = self._ranks[engine_idx]
            rank.running = scheduler_stats.num_running_reqs
            rank.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            rank.kv_usage = scheduler_stats.kv_cache_usage
            rank.moved.add(scheduler_stats.kv_connector_stats or {})
        self._counted = counted
        ranks = self._ranks.values()
        self._newest = replace(
            counted,
            running=sum(rank.running for rank in ranks),
            waiting=sum(rank.waiting for rank in ranks),
            kv_usage=sum(rank.kv_usage for rank in ranks) / len(ranks),
            kv_blocks_leased=sum(rank.moved.blocks_leased for rank in ranks),
            transfer_bytes_received=sum(rank.moved.bytes_received for rank in ranks),
            transfers_received=sum(rank.moved.transfers_received for rank in ranks),
            transfers_failed=sum(rank.moved.transfers_failed for rank in ranks),
        )

    def newest(self) -> EngineLoad:
        """The load after the last step; `kv_blocks_total` is left to the engine."""
        return self._newest

    def reset(self) -> None:
        """Forget what the warm-up counted."""
        self._ranks = {index: _Rank() for index in self._ranks}
        self._counted = EngineLoad()
        self._newest = EngineLoad()

    def log_engine_initialized(self) -> None:
        """Nothing is exported."""

    def log(self) -> None:
        """Nothing is exported."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Engines do not sleep here."""

    def record_admission_rejection(self, reason: str) -> None:
        """vLLM's own queue limits are off: admission is the router's."""


def _count(counted: EngineLoad, stats: Any) -> EngineLoad:
    prefix = stats.prefix_cache_stats
    speculation = stats.spec_decoding_stats
    return replace(
        counted,
        prefix_queries_tokens=counted.prefix_queries_tokens + (prefix.queries if prefix else 0),
        prefix_hits_tokens=counted.prefix_hits_tokens + (prefix.hits if prefix else 0),
        speculated_tokens=counted.speculated_tokens + (speculation.num_draft_tokens if speculation else 0),
        accepted_tokens=counted.accepted_tokens + (speculation.num_accepted_tokens if speculation else 0),
    )
