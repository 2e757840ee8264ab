"""The costs of work on each worker, learned from workers' measurements.

Prefill, transfer, decode step and loads from each lower tier follow `seconds = fixed + per unit * units`. The
two numbers are fitted by least squares with exponentially decaying weights, drawn towards a prior: for a
worker that is the rates of its pool, for a pool what all pools of its model on its hardware have measured
together, and before the first measurement the roofline of that hardware.

A worker without measurements, or with about the same as its pool, has exactly the rates of its pool. If a new
worker had the roofline's rates, the worker measured first would look better or worse than all others, and get
all requests or none; and in an idle fleet, so would the one that looks better by a rounding error. In the
same way, where costs decide whether a prompt is prefilled beside decoding or apart, a decode pool that has
measured prefills must not be compared with the roofline of a prefill pool that has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.kv import TierLoad
from kvasir.core.locality import LinkClass
from kvasir.core.requests import Timings, Usage
from kvasir.ports.routing import LOWER_TIERS, FloatColumn, IntColumn, RateColumns
from kvasir_router.decide.fits import PRIOR_WEIGHT, Line, LinearFit, differ
from kvasir_router.decide.links import (
    SLOWEST,
    TRANSFER_SCALE_BYTES,
    LinkFits,
    LinkPriors,
    LinkRates,
    link_rates_of,
)
from kvasir_router.decide.roofline import CostRates, rates_of

POOL_WEIGHT = 2.0
"""Weight of a pool's rates as a worker's prior, in measurements."""
PREFILL_SCALE_TOKENS = 1024.0
STEP_SCALE_STREAMS = 16.0
CHUNK_TOKENS = 2048
"""Prompt tokens that an engine computes in one step, beside decoding streams (chunked prefill): the default
of vLLM's max_num_batched_tokens on servers."""

LARGEST_STALL = 0.9
"""The part of a stream's decode time that may be attributed to prompts computed beside it."""

RATE_ROWS = 6 + 2 * LOWER_TIERS
"""The numbers of one worker's rates: the fields of RateColumns in order, tiers one by one."""

_PREFILL, _STEP, _TRANSFER, _TIERS = range(4)
"""Indexes of the fits; those of tiers are adjacent, in the order of media."""
_SCALES = (
    PREFILL_SCALE_TOKENS,
    STEP_SCALE_STREAMS,
    TRANSFER_SCALE_BYTES,
    *(TRANSFER_SCALE_BYTES,) * LOWER_TIERS,
)
_KINDS = range(len(_SCALES))
_APART = 0.15
"""A worker that differs from its pool by more than this fraction uses its own measurements."""
_SLOWNESS_STEP = 0.2
"""How far a measurement moves the slowness of a worker."""
_NEWS_PER_WORKER, _MOST_UNTOLD = 0.0005, 0.05
"""A pool publishes its rates to its workers once they changed by this fraction for each of them, and by the
latter at most, since publishing takes longer with more workers."""
_MOST_IDLE_POOLS = 64

_SharedKey = tuple[str, Hardware]
_PoolKey = tuple[str, KvLayout, _SharedKey]


def _fits(believed: CostRates, weight: float = PRIOR_WEIGHT) -> list[LinearFit]:
    pairs = (
        (believed.prefill_fixed_s, believed.prefill_token_s),
        (believed.step_fixed_s, believed.step_stream_s),
        (believed.transfer_fixed_s, believed.transfer_byte_s),
        *zip(believed.tier_fixed_s, believed.tier_byte_s, strict=True),
    )
    return [LinearFit(*pair, scale, weight) for pair, scale in zip(pairs, _SCALES, strict=True)]


def _rates(fits: list[LinearFit], links: LinkRates) -> CostRates:
    prefill, step, transfer, *tiers = fits
    cpu, disk, remote = tiers
    return CostRates(
        prefill_fixed_s=prefill.fixed_s,
        prefill_token_s=prefill.per_unit_s,
        step_fixed_s=step.fixed_s,
        step_stream_s=step.per_unit_s,
        transfer_fixed_s=transfer.fixed_s,
        transfer_byte_s=transfer.per_unit_s,
        tier_fixed_s=(cpu.fixed_s, disk.fixed_s, remote.fixed_s),
        tier_byte_s=(cpu.per_unit_s, disk.per_unit_s, remote.per_unit_s),
        links=links,
    )


@dataclass(slots=True, eq=False)
class _Shared:
    """The joint measurements of all pools of one model on one hardware. `drawn` are the lines to which the
    pools were drawn last, None for what was not measured then."""

    fits: list[LinearFit]
    drawn: list[Line | None] = field(default_factory=lambda: [None for _ in _KINDS])
    pools: list[_Pool] = field(default_factory=list)

    def add(self, pool: _Pool) -> None:
        """Begin the rates of a new pool with what others have measured."""
        for kind, fit in enumerate(self.fits):
            if fit.used:
                pool.fits[kind].draw_to(*fit.line)
                pool.published[kind].draw_to(*fit.line)
        pool.rates = _rates(pool.published, pool.rates.links)
        self.pools.append(pool)

    def observe(self, measured_by: _Pool, kind: int, units: float, seconds: float) -> list[_Pool]:
        """Learn from a measurement of one pool. Return the others if their priors changed."""
        fit, drawn = self.fits[kind], self.drawn[kind]
        fit.observe(units, seconds)
        if len(self.pools) == 1 or (drawn and not differ(fit.line, drawn, _SCALES[kind], _MOST_UNTOLD)):
            return []
        self.drawn[kind] = fit.line
        others = [pool for pool in self.pools if pool is not measured_by]
        for pool in others:
            pool.fits[kind].draw_to(*fit.line)
        return others


@dataclass(slots=True, eq=False)
class _Pool:
    """The joint measurements of all workers of one pool on one hardware. `published` is what decisions use,
    with `rates` as its numbers."""

    fits: list[LinearFit]
    published: list[LinearFit]
    rates: CostRates
    links: LinkFits
    shared: _Shared
    workers: set[str] = field(default_factory=set)

    @property
    def news(self) -> float:
        """The fraction by which a rate changes before it is published."""
        return min(_MOST_UNTOLD, _NEWS_PER_WORKER * len(self.workers))

    def publish(self, kind: int) -> set[str]:
        """Let decisions use the newest rates of one kind if they changed enough. Return the workers that are
        to renew theirs."""
        line, published = self.fits[kind].line, self.published[kind]
        if not differ(line, published.line, _SCALES[kind], self.news):
            return set()
        published.draw_to(*line)
        self.rates = _rates(self.published, self.rates.links)
        return self.workers


@dataclass(slots=True)
class _Worker:
    """One worker. `apart` are the fits in which it differs from its pool; its transfers take `slowness` times
    as long as its pool's over the same links."""

    pool: _Pool
    fits: list[LinearFit]
    rates: CostRates
    apart: set[int] = field(default_factory=set)
    slowness: float = 1.0
    tiers: dict[int, TierLoad] = field(default_factory=dict)

    def renew(self) -> bool:
        """Use the newest rates. Return whether they changed."""
        before, published = self.rates, self.pool.published
        self.rates = self.pool.rates
        if self.apart:
            fits = [self.fits[k] if k in self.apart else published[k] for k in _KINDS]
            self.rates = _rates(fits, self.rates.links)
        if abs(self.slowness - 1.0) > _APART:
            self.rates = self.rates._replace(links=self.rates.links.times(self.slowness))
        return self.rates != before


class RateBook:
    """The rates of every known worker; bounded by `forget`. `priors(identity)` returns the prior of the first
    worker of a pool where nothing is measured, by default the roofline of its hardware, and `links(identity)`
    that of its links."""

    def __init__(
        self,
        priors: Callable[[WorkerIdentity], CostRates] = rates_of,
        links: LinkPriors = link_rates_of,
    ) -> None:
        self._priors = priors
        self._links = links
        self._shared: dict[_SharedKey, _Shared] = {}
        self._pools: dict[_PoolKey, _Pool] = {}
        self._workers: dict[str, _Worker] = {}

    def join(self, worker_id: str, identity: WorkerIdentity) -> CostRates:
        """Add a worker without measurements, under its session id."""
        key = (identity.pool, identity.kv, (identity.model, identity.hardware))
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._new_pool(identity, key[-1])
        self._workers[worker_id] = _Worker(pool, _fits(pool.rates, POOL_WEIGHT), pool.rates)
        pool.workers.add(worker_id)
        return pool.rates

    def _new_pool(self, identity: WorkerIdentity, key: _SharedKey) -> _Pool:
        prior = self._priors(identity)._replace(links=self._links(identity))
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(_fits(prior))
        pool = _Pool(_fits(prior), _fits(prior), prior, LinkFits(prior.links), shared)
        shared.add(pool)
        return pool

    def rates(self, worker_id: str) -> CostRates:
        """Return the current estimate for a worker that has joined. Raises KeyError for another."""
        return self._workers[worker_id].rates

    def forget(self, worker_id: str) -> None:
        """Remove a worker. Its measurements stay with its pool."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        worker.pool.workers.discard(worker_id)
        idle = [key for key, pool in self._pools.items() if not pool.workers]
        for key in idle[:-_MOST_IDLE_POOLS]:
            shared = self._shared[key[-1]]
            shared.pools.remove(self._pools.pop(key))
            if not shared.pools:
                del self._shared[key[-1]]

    def observe(
        self,
        worker_id: str,
        usage: Usage,
        timings: Timings,
        *,
        streams: int,
        beside_tokens: int = 0,
        link: LinkClass = LinkClass.UNKNOWN,
        now: float = 0.0,
    ) -> set[str]:
        """Learn from a leg that ended well while `streams` were decoding on its worker, itself included if it
        decoded, and `beside_tokens` of other prompts were computed there during its decode. What it received
        came over `link`. `now` is a reading of the router's clock in seconds. Return the workers whose rates
        changed. Raises KeyError for a worker that has not joined."""
        known = self._workers[worker_id].rates
        computed = usage.prompt_tokens - usage.cached_tokens - usage.transferred_tokens
        news: set[str] = set()
        if timings.prefill_s > 0.0 and computed > 0:
            beside = streams - (usage.output_tokens > 1)
            seconds = timings.prefill_s / contention(known, beside)
            self._learn(worker_id, _PREFILL, computed, seconds, news)
        if timings.transfer_s > 0.0 and usage.transferred_bytes > 0:
            self._learn(worker_id, _TRANSFER, usage.transferred_bytes, timings.transfer_s, news)
            if link is not LinkClass.UNKNOWN:
                news |= self._learn_link(worker_id, link, usage.transferred_bytes, timings.transfer_s, now)
        if timings.decode_s > 0.0 and usage.output_tokens > 1:
            stalled = min(beside_tokens * known.prefill_token_s, LARGEST_STALL * timings.decode_s)
            seconds = (timings.decode_s - stalled) / (usage.output_tokens - 1)
            self._learn(worker_id, _STEP, streams, seconds, news)
        return self._renewed(news)

    def loaded(self, worker_id: str, tiers: Iterable[TierLoad]) -> set[str]:
        """Learn from the loads of the worker's tiers since the last call. Return the workers whose rates
        changed. Raises KeyError for a worker that has not joined."""
        worker = self._workers[worker_id]
        news: set[str] = set()
        for tier in tiers:
            last = worker.tiers.get(tier.medium) or TierLoad(tier.medium)
            if last.loads == tier.loads:
                continue
            worker.tiers[tier.medium] = tier
            loads, loaded = tier.loads - last.loads, tier.loaded_bytes - last.loaded_bytes
            seconds = tier.load_s - last.load_s
            # Negative if the worker restarted its counters.
            if loads > 0 and loaded > 0 and seconds > 0.0:
                kind = _TIERS + tier.medium - 1
                self._learn(worker_id, kind, loaded / loads, seconds / loads, news)
        return self._renewed(news)

    def _learn(self, worker_id: str, kind: int, units: float, seconds: float, news: set[str]) -> None:
        worker = self._workers[worker_id]
        pool, scale = worker.pool, _SCALES[kind]
        together, own = pool.fits[kind], worker.fits[kind]
        together.observe(units, seconds)
        own.observe(units, seconds, drawn_to=together)
        (worker.apart.add if differ(own.line, together.line, scale, _APART) else worker.apart.discard)(kind)
        news.add(worker_id)
        for each in (pool, *pool.shared.observe(pool, kind, units, seconds)):
            news |= each.publish(kind)

    def _learn_link(
        self, worker_id: str, link: LinkClass, moved_bytes: float, seconds: float, now: float
    ) -> set[str]:
        """Return the workers whose rates may have changed."""
        worker = self._workers[worker_id]
        pool = worker.pool
        ratio = seconds / pool.links.rates.seconds(link, moved_bytes)
        worker.slowness += _SLOWNESS_STEP * (min(max(ratio, 1 / SLOWEST), SLOWEST) - worker.slowness)
        pool.links.observe(link, moved_bytes, seconds, now)
        if not pool.links.rates.differ(pool.rates.links, pool.news):
            return {worker_id}
        pool.rates = pool.rates._replace(links=pool.links.rates)
        return pool.workers

    def _renewed(self, news: set[str]) -> set[str]:
        return {worker_id for worker_id in news if self._workers[worker_id].renew()}


def contention(rates: CostRates, streams: int) -> float:
    """Return how many times longer a prompt takes while `streams` decode on the same worker: each chunk of it
    shares its step with one token of every stream."""
    alone = rates.prefill_token_s * CHUNK_TOKENS
    if streams <= 0 or alone <= 0.0:
        return 1.0
    return 1.0 + (rates.step_fixed_s + streams * rates.step_stream_s) / alone


def write_links(table: FloatColumn, rows: slice | IntColumn, rates: CostRates) -> None:
    """Write the rates of links to some columns of a table of shape 2 * LINKS x places."""
    fixed_s, byte_s = rates.links
    table[:, rows] = np.array((*fixed_s, *byte_s))[:, None]


def write_rates(table: FloatColumn, rows: slice | IntColumn, rates: CostRates) -> None:
    """Write rates to some columns of a table of shape RATE_ROWS x places."""
    values = (*rates[:6], *rates.tier_fixed_s, *rates.tier_byte_s)
    table[:RATE_ROWS, rows] = np.array(values)[:, None]


def rate_columns(table: FloatColumn) -> RateColumns:
    """Return a table of shape RATE_ROWS x places as columns, without a copy."""
    tiers = 6 + LOWER_TIERS
    prefill_fixed, prefill_token, step_fixed, step_stream, transfer_fixed, transfer_byte = table[:6]
    return RateColumns(
        prefill_fixed_s=prefill_fixed,
        prefill_token_s=prefill_token,
        step_fixed_s=step_fixed,
        step_stream_s=step_stream,
        transfer_fixed_s=transfer_fixed,
        transfer_byte_s=transfer_byte,
        tier_fixed_s=table[6:tiers].T,
        tier_byte_s=table[tiers:RATE_ROWS].T,
    )
