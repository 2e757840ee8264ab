"""The Python twin of the native costs of places, with numpy. `_native.pyi` has the contract."""

from __future__ import annotations

import numpy as np

from kvasir.ports.routing import FloatColumn, IntColumn, RateColumns

_TERMS = 14
_SHORTEST_S = 1e-9
"""Avoids division by zero for a promised time of zero; too short to be measured."""


def cost_terms(
    counts: tuple[IntColumn, ...],
    kv_token_bytes: FloatColumn,
    rates: RateColumns,
    request: tuple[float, float, float, float],
    weights: tuple[float, float, float, float, float, float],
    *,
    whole: bool,
) -> FloatColumn:
    """See `_native.pyi`."""
    cached, tier_tokens, queued, waiting, decoding, reserved, held, capacity = counts
    prompt, output, choices, promised_s = request
    within, steepest, a_stream, of_work, reuse, per_chunk = weights
    terms: FloatColumn = np.zeros((_TERMS, len(cached)))
    transfer, step, link, _, memory, decode, queue, load, prefill, _, work, displace, stall, missing = terms

    streams = decoding.astype(np.float64)
    step_streams = rates.step_stream_s * streams
    running = rates.step_fixed_s + step_streams
    token_s = np.minimum(streams, 1.0) * running * per_chunk + rates.prefill_token_s
    chunks = np.minimum(waiting, queued * per_chunk + 1.0)
    queue[:] = queued * token_s + chunks * rates.prefill_fixed_s

    missing[:] = prompt - cached
    transfer[:] = missing * kv_token_bytes * rates.transfer_byte_s + rates.transfer_fixed_s
    link[:] = transfer * of_work
    fetched, load[:] = _from_tiers(tier_tokens, kv_token_bytes, rates, token_s)
    missing -= fetched
    prefill[:] = missing * token_s + rates.prefill_fixed_s
    work[:] = prefill * of_work
    kv_tokens = np.maximum(capacity, 1.0)
    displace[:] = prefill * (np.minimum(held / kv_tokens, 1.0) * reuse)

    step[:] = running + rates.step_stream_s * choices
    if whole:
        backlog = (queue + prefill) * (1.0 / max(output, 1.0)) + step
        stall[:] = missing * rates.prefill_token_s * streams
        stall *= _urgency(backlog, promised_s, within, steepest)
        stall *= a_stream
    count = float(np.add.reduce(streams))
    # Added up in order, as sums of numpy's are not.
    itl_s = float(np.cumsum(streams * step)[-1]) / count if count else 0.0
    used = min(itl_s / max(promised_s, _SHORTEST_S), steepest)
    decode[:] = (step + step_streams) * (a_stream * (within + used) * output * choices)
    excess = prompt + output * choices + reserved - kv_tokens
    memory[:] = np.maximum(excess, 0.0) / kv_tokens * (step * output)
    return terms


def cost_pairs(
    terms: FloatColumn,
    prefills: IntColumn,
    decodes: IntColumn,
    excess_s: FloatColumn | None,
    promise: tuple[float, float, float, float],
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """See `_native.pyi`."""
    promised_s, within, steepest, of_work = promise
    transfer, step, link, _, memory, decode, queue, load, prefill, _, work, displace, stall, _ = terms
    before, others = queue + load + prefill, work + displace + stall
    after, output = transfer + memory + step, link + decode
    ttft = before[prefills][:, None] + after[decodes]
    if excess_s is not None:
        ttft += excess_s
    waits = _urgency(ttft, promised_s, within, steepest) * ttft
    costs = waits + others[prefills][:, None] + output[decodes]
    if excess_s is not None:
        costs += excess_s * of_work
    return ttft, waits - ttft, costs


def _urgency(seconds: FloatColumn, promised_s: float, within: float, steepest: float) -> FloatColumn:
    """Return the weight of each of these waits."""
    used: FloatColumn = np.minimum(seconds * (1.0 / max(promised_s, _SHORTEST_S)), steepest) + within
    return used


def _from_tiers(
    tokens: IntColumn, kv_token_bytes: FloatColumn, rates: RateColumns, token_s: FloatColumn
) -> tuple[IntColumn, FloatColumn]:
    """Return how many tokens are worth fetching from lower tiers, each considered only below the ones above
    it, and the seconds that this takes."""
    seconds = tokens * kv_token_bytes[:, None] * rates.tier_byte_s
    seconds += rates.tier_fixed_s * np.minimum(tokens, 1)
    saved = np.cumsum(tokens * token_s[:, None] - seconds, axis=1)
    tier = saved.argmax(axis=1)[:, None]
    worth = np.take_along_axis(saved, tier, 1)[:, 0] > 0.0
    load = np.take_along_axis(np.cumsum(seconds, axis=1), tier, 1)[:, 0] * worth
    fetched: IntColumn = np.take_along_axis(np.cumsum(tokens, axis=1), tier, 1)[:, 0] * worth
    return fetched, load
