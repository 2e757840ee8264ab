"""Mooncake Conductor's KVCache-centric scheduling.

Source: R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving",
arXiv:2407.00079 (FAST '25), section 6.1, algorithm 1:

    best = the longest prefix that any prefill instance holds
    best / prefix < kvcache_balancing_threshold:
        TTFT = T_queue + T_prefill(prompt, prefix)
    else (balancing):
        TTFT = T_transfer(best - prefix) + T_queue + T_prefill(prompt, best)
    the instance with the smallest TTFT; the decode instance by load, with its TBT
    TTFT > TTFT_SLO or TBT > TBT_SLO: reject

`prefix` counts blocks in the worker's own memory and disks, where Mooncake's cache is. T_queue is the prefill
time of waiting prompts, T_transfer that of the missing bytes, both at the measured rates. The paper does not
give the threshold's value; it is 2 here. Admission rejects requests here: such a request runs, with the
reason `mooncake_over_slo`. The migration in the second branch (lines 28 to 30) does not exist here: the
chosen place computes what it does not hold. With `migrates=False` the estimate reflects that, and the first
branch is used everywhere.
"""

from __future__ import annotations

import numpy as np

from kvasir.ports.clock import Rng
from kvasir.ports.routing import FloatColumn, IntColumn
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.place import PeerPolicy, PlacementChoice, PlacementQuery, least

BALANCING_THRESHOLD = 2.0
LOCAL_TIERS = 2
"""CPU memory and disk; blocks in a remote store belong to no instance."""

OVER_SLO = "mooncake_over_slo"


class Mooncake(PeerPolicy):
    """Mooncake's scheduler; the sum of a row's terms is its predicted TTFT in seconds, or for decode places
    TBT."""

    name = "mooncake"

    def __init__(
        self,
        disaggregation: Disaggregation,
        rng: Rng,
        *,
        kvcache_balancing_threshold: float = BALANCING_THRESHOLD,
        migrates: bool = True,
    ) -> None:
        super().__init__(disaggregation, rng)
        self._threshold = kvcache_balancing_threshold
        self._migrates = migrates

    def _place(self, ask: PlacementQuery) -> PlacementChoice:
        rates, rows = ask.candidates.rates, ask.rows
        prompt = ask.request.prompt_tokens
        fixed, token = rates.prefill_fixed_s[rows], rates.prefill_token_s[rows]
        queue = fixed * ask.candidates.waiting[rows] + token * ask.candidates.queued_prefill_tokens[rows]
        prefix, best = self._prefixes(ask)
        moved = np.where(self._balances(prefix, best), best - prefix, 0)
        prefill = fixed + token * (prompt - prefix - moved)
        size = moved * ask.candidates.kv_token_bytes[rows]
        transfer = np.where(moved, rates.transfer_fixed_s[rows] + rates.transfer_byte_s[rows] * size, 0.0)
        ttft = transfer + queue + prefill
        row = least(rows, ttft, self._rng)
        expected = float(ttft.min())
        table = ask.table("s", ("transfer", "queue", "prefill"), transfer, queue, prefill)
        reason = OVER_SLO if expected > ask.request.slo.ttft_s else ""
        return PlacementChoice(row, table, reason, expected)

    def _decode(self, ask: PlacementQuery) -> PlacementChoice:
        rates, rows = ask.candidates.rates, ask.rows
        streams = ask.candidates.streams[rows] + ask.request.choices
        tbt: FloatColumn = rates.step_fixed_s[rows] + rates.step_stream_s[rows] * streams
        row = least(rows, tbt, self._rng)
        reason = OVER_SLO if float(tbt.min()) > ask.request.slo.itl_s else ""
        return PlacementChoice(row, ask.table("s", ("step",), tbt), reason)

    def _prefixes(self, ask: PlacementQuery) -> tuple[IntColumn, int]:
        tiers = ask.candidates.tier_tokens[ask.rows, :LOCAL_TIERS].sum(axis=1)
        prefix: IntColumn = ask.candidates.cached_tokens[ask.rows] + tiers
        return prefix, int(prefix.max())

    def _balances(self, prefix: IntColumn, best: int) -> np.ndarray:
        return self._migrates & (best > prefix) & (best >= self._threshold * prefix)
