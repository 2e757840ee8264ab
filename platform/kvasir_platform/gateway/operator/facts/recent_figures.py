"""Figures of the requests that were answered in the last minute.

The console shows them every second, so they are made of columns, and no request is unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvasir.ports.router import EndedRequests
from kvasir_platform.gateway.openai.schema.operation import RecentRequests
from kvasir_platform.gateway.operator.timelines import rounded

RECENT_S = 60.0
_SHARES = (0.5, 0.95)


def recent_requests(ended: Sequence[EndedRequests], now: float, kept: int) -> RecentRequests | None:
    """Return the figures of all models, None if no requests are `kept`. `ended` are the requests of each
    model that ended last, at most `kept` of them, and `now` reads the clock of their times."""
    if not kept:
        return None
    ends = [of_model.column("finished_s") for of_model in ended]
    # Of a model with as many requests as are kept, earlier ones are unknown, so all models begin there.
    since = max([now - RECENT_S, *(each.item(0) for each in ends if len(each) >= kept)])
    ttft, itl = [np.empty(0)], [np.empty(0)]
    answered, prompt, cached = 0, 0.0, 0.0
    for of_model, finished in zip(ended, ends, strict=True):
        recent = finished >= since
        if not recent.any():
            continue
        rows = recent & (of_model.column("answered") == 1.0)
        answered += int(np.count_nonzero(rows))
        prompt += float(of_model.column("prompt_tokens")[rows].sum())
        cached += float(of_model.column("cached_tokens")[rows].sum())
        ttft.append(of_model.column("ttft_s")[rows])
        itl.append(of_model.column("itl_s")[rows])
    ttft_s, ttft_p95_s = _quantiles(np.concatenate(ttft))
    itl_s, itl_p95_s = _quantiles(np.concatenate(itl))
    return RecentRequests(
        over_s=round(max(0.0, now - since), 3),
        answered=answered,
        ttft_s=ttft_s,
        ttft_p95_s=ttft_p95_s,
        itl_s=itl_s,
        itl_p95_s=itl_p95_s,
        hit_rate=cached / prompt if prompt else None,
    )


def _quantiles(figures: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return median and 95th percentile of what is known; the values that these shares do not exceed."""
    known = figures[~np.isnan(figures)]
    if not len(known):
        return None, None
    places = [max(0, math.ceil(share * len(known)) - 1) for share in _SHARES]
    ordered = np.partition(known, places)
    return rounded(ordered.item(places[0])), rounded(ordered.item(places[1]))
