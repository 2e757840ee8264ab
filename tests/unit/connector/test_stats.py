"""Statistics of several steps and ranks are merged into those of one engine."""

from __future__ import annotations

import json

from kvasir.core.kv import Medium, TierLoad
from kvasir_workers.connector import stats
from kvasir_workers.connector.stats import TransferTotals, all_ranks, tier_as_dict


def test_tiers_arrive_as_they_were_sent() -> None:
    load = TierLoad(Medium.DISK, blocks=3, load_s=0.5, trouble="full; free space")
    totals = TransferTotals()
    totals.add({stats.TIERS: json.loads(json.dumps([tier_as_dict(load)])), stats.SWAPPED_IN: 2})
    totals.add({stats.SWAPPED_IN: 1, stats.RECOMPUTED: 4})
    assert totals.tiers == (load,)
    assert (totals.swapped_in, totals.recomputed) == (3, 4)


def test_ranks_add_up_and_one_rank_s_trouble_is_the_engine_s() -> None:
    one = [TierLoad(Medium.CPU, blocks=1, bytes_capacity=10), TierLoad(Medium.REMOTE, loads=1, load_s=0.5)]
    down = TierLoad(Medium.REMOTE, loads=2, load_s=0.25, trouble="down", readable=False)
    other = [down, TierLoad(Medium.CPU, blocks=2)]
    assert all_ranks([*one, *other]) == (
        TierLoad(Medium.CPU, blocks=3, bytes_capacity=10),
        TierLoad(Medium.REMOTE, loads=3, load_s=0.75, trouble="down", readable=False),
    )
