"""What the requests that ended in the last minute say is wrong: which promise they broke, what took the time,
and whether that was on one worker. A pure function, for the verdict on a deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvasir.ports.router import EndedRequests, RequestSummary
from kvasir.telemetry.missed_slo import SloMiss, slo_miss
from kvasir_platform.gateway.openai.schema.operation import StatusProblem

_RECENT_S = 60.0
_LEAST = 10
"""Requests from which there is something to say."""
_MOST = 500
"""The most that are judged of a model, the newest: the console reads the page every second."""
_SHARE = 0.1
"""The share of requests that break a promise from which it is a problem."""
_ON_ONE = 0.7
"""The share of the misses on one worker from which it is named, if it serves less than that of all."""
_WARM = 0.1
"""The hit rate from which a cache is said to have been warm."""
_COLDER = 0.5
"""A cache is cold below this fraction of its earlier hit rate: as the alert's."""
_TTFT: Mapping[str, tuple[str, str]] = {
    "queue": (
        "waiting for a worker",
        "add workers (`kvasir scale POOL=N`), or find who sends so much: `kvasir top`",
    ),
    "tier": (
        "reading KV from a tier",
        "check the disk or the Redis of `tiers`; `kvasir get workers` names it",
    ),
    "prefill": (
        "computing prompts",
        "add workers that prefill, or see whose prompts are long: `kvasir tail --slow`",
    ),
    "transfer": ("transferring KV", "check the link between the workers, and their logs; docs/TOPOLOGY.md"),
    "decode": ("the first step of decoding", "add workers that decode, or lower their `engine.max_num_seqs`"),
}
_ITL: Mapping[str, tuple[str, str]] = {
    "decode": ("steps of engines", "add workers that decode, or lower their `engine.max_num_seqs`"),
    "moved": ("continuing on other workers", "see which workers are lost, and why: `kvasir get workers`"),
}
"""By the cause of a miss: what takes the time, and the remedy."""


def problems_of_requests(ended: Sequence[EndedRequests], now: float) -> Iterator[StatusProblem]:
    """Yield what is wrong with each model. `ended` are the requests of each that ended last, and `now` reads
    the clock of their times."""
    for of_model in ended:
        recent = now - of_model.column("finished_s") <= _RECENT_S
        newest = np.flatnonzero(recent)[-_MOST:]
        if len(newest) >= _LEAST:
            model = of_model[newest.item(-1)].model
            yield from _misses(model, of_model, newest)
            yield from _cold(model, of_model, recent)
            yield from _cross_role(model, of_model, newest)


def _misses(model: str, ended: EndedRequests, newest: NDArray[np.intp]) -> Iterator[StatusProblem]:
    met = ended.column("slo_met")[newest]
    judged, rows = np.count_nonzero(~np.isnan(met)), newest[met == 0.0].tolist()
    if not rows or len(rows) < _SHARE * judged:
        # Without unpacking hundreds of requests every second of a deployment that is well.
        return
    recent = [ended[row] for row in newest.tolist()]
    found = [(each, miss) for each in recent if (miss := slo_miss(each)) is not None]
    for promise in ("success", "ttft", "itl"):
        missed = [each for each in found if each[1].promise == promise]
        if missed and len(missed) >= _SHARE * judged:
            share = f"{len(missed):,} of the last {judged:,} requests to {model}"
            yield (
                _failing(model, share, missed)
                if promise == "success"
                else _slow(model, share, missed, recent)
            )


def _failing(model: str, share: str, missed: Sequence[tuple[RequestSummary, SloMiss]]) -> StatusProblem:
    outcome, _ = Counter(summary.outcome for summary, _ in missed).most_common(1)[0]
    remedy = f"docs/errors.md explains `{outcome}`; see the requests: `kvasir tail --failed`"
    text = f"{share} failed, most of them with {outcome}"
    return StatusProblem("degraded", "failing_requests", model, text, remedy)


def _slow(
    model: str,
    share: str,
    missed: Sequence[tuple[RequestSummary, SloMiss]],
    recent: Sequence[RequestSummary],
) -> StatusProblem:
    promise = missed[0][1].promise
    cause, _ = Counter(miss.cause for _, miss in missed).most_common(1)[0]
    takes, remedy = (_TTFT if promise == "ttft" else _ITL)[cause]
    what = "time to first token" if promise == "ttft" else "time between tokens"
    text = f"{share} missed their promised {what}; most of it was {takes}"
    worker = _one_worker([miss for _, miss in missed], recent)
    if worker is not None:
        text += f", mostly on worker {worker}"
        remedy = f"read its log (`kvasir logs {worker}`), and take it out: `kvasir drain {worker}`"
    code = "slow_first_tokens" if promise == "ttft" else "slow_tokens"
    return StatusProblem("degraded", code, model if worker is None else worker, text, remedy)


def _one_worker(misses: Sequence[SloMiss], recent: Sequence[RequestSummary]) -> str | None:
    """Return the worker with most of the misses, unless it serves most requests anyway."""
    (worker, count), *_ = Counter(miss.worker for miss in misses).most_common(1)
    if worker is None or count < _ON_ONE * len(misses):
        return None
    served = sum(worker in (each.prefill_worker, each.decode_worker) for each in recent)
    return worker if served < _ON_ONE * len(recent) else None


def _cold(model: str, ended: EndedRequests, recent: NDArray[np.bool_]) -> Iterator[StatusProblem]:
    if np.count_nonzero(~recent) < _LEAST:
        return
    prompt, cached = ended.column("prompt_tokens"), ended.column("cached_tokens")
    before, after = (_hit_rate(prompt[rows], cached[rows]) for rows in (~recent, recent))
    if before >= _WARM and after < _COLDER * before:
        text = (
            f"the prefix caches of {model} are cold: {after:.0%} of prompt tokens were cached in the last "
            f"minute, {before:.0%} before"
        )
        remedy = "see whether workers restarted: `kvasir get workers`; else what prompts share has changed"
        yield StatusProblem("warning", "cold_cache", model, text, remedy)


def _hit_rate(prompt_tokens: NDArray[np.float64], cached_tokens: NDArray[np.float64]) -> float:
    prompt = float(prompt_tokens.sum())
    return float(cached_tokens.sum()) / prompt if prompt else 0.0


def _cross_role(model: str, ended: EndedRequests, newest: NDArray[np.intp]) -> Iterator[StatusProblem]:
    count = np.count_nonzero(ended.column("cross_role")[newest])
    if count >= _SHARE * len(newest):
        text = (
            f"{count:,} of the last {len(newest):,} requests to {model} ran whole on one worker, because "
            "none of the right role served"
        )
        remedy = "see which pool has no worker, and why: `kvasir get workers`"
        yield StatusProblem("degraded", "role_lost", model, text, remedy)
