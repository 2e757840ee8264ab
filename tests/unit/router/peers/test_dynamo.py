"""Dynamo's decisions, recorded from its own package.

The tables were made once with ai-dynamo-runtime 1.6.1 from PyPI: its `SelectionService` was given workers
that publish KV events over ZMQ (`cached`, blocks on the device, in host memory and on disk), reservations
(`active`: worker, blocks shared with the request, kind and number of other blocks), and asked twelve times
for a place; situations in which it did not always answer the same were left out. `queued` and `decode` are
what it reported itself (`loads`, `potential_loads`). `PREFILL` was made with reservations that hold no
blocks, as in its prefill router, which tracks none; `DECODE` with the service's own settings set to what its
frontend gives its decode router: overlap_score_credit 0, track_prefill_tokens and assume_kv_reuse false
(`reserved` blocks as it reported them). Given for one request, the credit had no effect in that version. A
block has 16 tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.dynamo import Dynamo

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]


class Whole(NamedTuple):
    tokens: int
    cached: list[list[int]]
    queued: list[int]
    active: list[tuple[int, int, int, int]]
    decode: list[int]
    chosen: int


class Prefill(NamedTuple):
    tokens: int
    cached: list[list[int]]
    queued: list[int]
    chosen: int


class Decode(NamedTuple):
    reserved: list[int]
    cached: list[list[int]]
    chosen: int


WHOLE = [
    Whole(
        69,
        [[0, 0, 0], [2, 2, 0], [2, 0, 0]],
        [176, 0, 0],
        [(0, 2, 5, 1), (1, 0, 2, 5), (0, 0, 2, 10)],
        [15, 9, 4],
        2,
    ),
    Whole(
        521,
        [[0, 0, 0], [8, 8, 0], [0, 0, 0]],
        [0, 544, 32],
        [(2, 32, 2, 2), (1, 16, 2, 10), (1, 32, 5, 2)],
        [32, 44, 34],
        0,
    ),
    Whole(128, [[4, 2, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]], [0, 0, 0, 0], [], [8, 8, 8, 8], 0),
    Whole(64, [[1, 1, 0], [2, 1, 0], [0, 0, 0]], [0, 0, 0], [], [4, 4, 4], 1),
    Whole(137, [[0, 0, 0], [8, 0, 0]], [144, 80], [(0, 2, 2, 2), (0, 4, 2, 10), (1, 0, 4, 10)], [20, 18], 1),
    Whole(
        512,
        [[0, 0, 0], [16, 0, 0], [0, 0, 0]],
        [168, 296, 272],
        [(0, 16, 5, 5), (2, 16, 4, 1), (2, 8, 2, 1), (1, 32, 4, 10), (1, 16, 2, 1)],
        [37, 43, 34],
        1,
    ),
    Whole(
        69,
        [[0, 0, 0], [2, 1, 0], [1, 0, 0], [4, 0, 0]],
        [104, 0, 0, 0],
        [(0, 4, 2, 2), (0, 0, 5, 1)],
        [7, 4, 4, 4],
        3,
    ),
    Whole(64, [[0, 0, 0], [1, 1, 1]], [152, 0], [(0, 0, 4, 1), (0, 0, 3, 5), (0, 4, 4, 2)], [12, 4], 1),
    Whole(
        521,
        [[8, 2, 2], [0, 0, 0]],
        [416, 432],
        [(0, 32, 2, 5), (1, 0, 3, 1), (0, 16, 5, 10), (1, 16, 3, 10)],
        [47, 43],
        0,
    ),
    Whole(521, [[0, 0, 0], [8, 1, 0]], [376, 0], [(0, 0, 5, 1), (0, 8, 3, 2), (0, 32, 3, 5)], [40, 32], 1),
    Whole(
        512, [[32, 0, 0], [16, 0, 0], [32, 0, 0]], [8, 0, 40], [(0, 0, 2, 1), (2, 0, 2, 5)], [33, 32, 37], 0
    ),
    Whole(261, [[8, 4, 0], [0, 0, 0]], [0, 16], [(1, 8, 3, 10), (1, 16, 2, 10), (1, 0, 5, 1)], [16, 37], 0),
    Whole(73, [[1, 1, 0], [0, 0, 0], [4, 0, 0]], [0, 80, 48], [(1, 0, 2, 5), (2, 4, 2, 2)], [4, 9, 6], 0),
    Whole(
        128,
        [[0, 0, 0], [8, 0, 0], [0, 0, 0]],
        [80, 96, 80],
        [(1, 4, 3, 2), (2, 4, 4, 5), (0, 0, 3, 5), (0, 0, 5, 5)],
        [18, 10, 13],
        1,
    ),
    Whole(
        128,
        [[0, 0, 0], [8, 0, 0]],
        [296, 200],
        [(0, 4, 5, 5), (0, 8, 3, 1), (1, 0, 5, 10), (0, 0, 3, 5), (1, 0, 5, 5)],
        [19, 18],
        1,
    ),
    Whole(73, [[1, 0, 0], [4, 0, 0], [0, 0, 0]], [0, 0, 0], [], [4, 4, 4], 1),
    Whole(
        73,
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [80, 96, 32],
        [(2, 0, 4, 2), (1, 1, 4, 5), (0, 0, 3, 5)],
        [9, 9, 6],
        2,
    ),
    Whole(
        265,
        [[16, 0, 0], [8, 0, 0]],
        [152, 16],
        [(0, 4, 3, 1), (0, 0, 5, 1), (0, 16, 5, 5), (1, 0, 3, 1), (0, 8, 5, 1)],
        [24, 17],
        1,
    ),
    Whole(261, [[0, 0, 0], [4, 0, 1]], [0, 0], [], [16, 16], 1),
    Whole(
        265, [[8, 0, 1], [4, 0, 1], [0, 0, 0], [0, 0, 0]], [0, 0, 80, 0], [(2, 4, 3, 5)], [16, 16, 21, 16], 0
    ),
    Whole(
        73,
        [[1, 0, 0], [4, 0, 0], [0, 0, 0]],
        [32, 48, 32],
        [(0, 0, 4, 2), (2, 4, 2, 2), (1, 1, 5, 5)],
        [6, 9, 6],
        0,
    ),
    Whole(64, [[1, 1, 0], [0, 0, 0], [0, 0, 0]], [0, 0, 0], [(2, 1, 4, 10), (0, 1, 4, 2)], [6, 4, 14], 1),
    Whole(128, [[2, 0, 0], [0, 0, 0], [2, 1, 0]], [0, 0, 0], [(2, 0, 4, 1), (0, 4, 4, 2)], [10, 8, 9], 2),
    Whole(
        69,
        [[0, 0, 0], [4, 0, 0], [4, 0, 0], [0, 0, 0]],
        [0, 40, 160, 40],
        [(2, 2, 3, 2), (1, 0, 5, 5), (2, 0, 3, 10), (3, 0, 3, 5)],
        [4, 9, 16, 9],
        0,
    ),
]

PREFILL = [
    Prefill(64, [[1, 0, 0], [1, 1, 0]], [240, 96], 1),
    Prefill(64, [[1, 0, 0], [4, 0, 0], [4, 0, 0]], [0, 312, 0], 2),
    Prefill(265, [[8, 0, 0], [0, 0, 0], [16, 0, 0], [4, 1, 2]], [672, 0, 0, 112], 2),
    Prefill(73, [[0, 0, 0], [0, 0, 0], [1, 1, 0]], [0, 0, 0], 2),
    Prefill(64, [[1, 1, 0], [0, 0, 0]], [32, 80], 0),
    Prefill(73, [[0, 0, 0], [4, 0, 0]], [0, 48], 1),
    Prefill(128, [[0, 0, 0], [0, 0, 0], [4, 0, 0], [0, 0, 0]], [0, 96, 0, 0], 2),
    Prefill(64, [[0, 0, 0], [4, 0, 0], [1, 1, 1]], [0, 0, 0], 1),
    Prefill(512, [[0, 0, 0], [16, 1, 0]], [296, 0], 1),
    Prefill(256, [[4, 1, 0], [0, 0, 0]], [280, 0], 1),
    Prefill(265, [[0, 0, 0], [16, 0, 0], [0, 0, 0], [4, 0, 2]], [0, 0, 0, 16], 1),
    Prefill(512, [[8, 2, 0], [32, 0, 0], [0, 0, 0]], [32, 176, 32], 1),
    Prefill(73, [[0, 0, 0], [4, 0, 0]], [112, 0], 1),
    Prefill(137, [[2, 0, 0], [0, 0, 0], [4, 2, 1]], [192, 160, 72], 2),
    Prefill(512, [[32, 0, 0], [0, 0, 0], [0, 0, 0]], [368, 520, 168], 0),
    Prefill(265, [[0, 0, 0], [4, 1, 0], [8, 0, 0], [0, 0, 0]], [96, 0, 40, 0], 2),
    Prefill(261, [[16, 0, 0], [0, 0, 0]], [0, 0], 0),
    Prefill(512, [[0, 0, 0], [32, 0, 0]], [0, 16], 1),
    Prefill(128, [[4, 0, 2], [0, 0, 0], [0, 0, 0], [8, 0, 0]], [0, 0, 0, 0], 3),
    Prefill(69, [[4, 0, 0], [1, 2, 0], [0, 0, 0]], [272, 0, 208], 1),
    Prefill(265, [[0, 0, 0], [8, 0, 1], [4, 1, 0]], [368, 0, 0], 1),
    Prefill(512, [[0, 0, 0], [0, 0, 0], [32, 0, 0]], [0, 160, 320], 2),
    Prefill(256, [[16, 0, 0], [0, 0, 0], [0, 0, 0]], [0, 40, 0], 0),
    Prefill(73, [[2, 0, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]], [0, 0, 0, 0], 1),
]

DECODE = [
    Decode([5, 1, 0], [[8, 0, 0], [0, 0, 0], [0, 0, 0]], 2),
    Decode([0, 9], [[0, 0, 0], [0, 0, 0]], 0),
    Decode([0, 21, 8], [[0, 0, 0], [2, 1, 2], [8, 0, 0]], 0),
    Decode([1, 6, 24], [[0, 0, 0], [0, 0, 0], [4, 2, 0]], 0),
    Decode([0, 28, 26], [[8, 1, 0], [32, 0, 0], [32, 0, 0]], 0),
    Decode([3, 20, 5], [[0, 0, 0], [0, 0, 0], [16, 0, 0]], 0),
    Decode([19, 28, 0], [[8, 0, 0], [0, 0, 0], [8, 0, 0]], 2),
    Decode([5, 0], [[0, 0, 0], [2, 2, 0]], 1),
    Decode([13, 14], [[0, 0, 0], [1, 0, 2]], 0),
    Decode([15, 0], [[0, 0, 0], [2, 2, 0]], 1),
    Decode([12, 9, 0], [[0, 0, 0], [4, 2, 0], [0, 0, 0]], 2),
    Decode([5, 10, 0], [[0, 0, 0], [1, 0, 0], [2, 0, 0]], 2),
    Decode([1, 14, 12], [[0, 0, 0], [0, 0, 0], [8, 0, 0]], 0),
    Decode([2, 17], [[0, 0, 0], [0, 0, 0]], 0),
    Decode([0, 7, 3], [[4, 0, 0], [2, 1, 1], [4, 0, 0]], 0),
    Decode([0, 10, 3], [[8, 0, 0], [0, 0, 0], [0, 0, 0]], 0),
]


def cache_columns(cached: list[list[int]], extra: int = 0) -> dict[str, object]:
    return {
        "cached_tokens": [device * 16 for device, _, _ in cached] + [0] * extra,
        "tier_tokens": [[host * 16, disk * 16, 0] for _, host, disk in cached] + [[0, 0, 0]] * extra,
    }


def spelled(share: int, kind: int, other: int) -> list[object]:
    return [*range(share), *((kind, share, index) for index in range(other))]


@pytest.mark.parametrize("golden", WHOLE)
def test_whole_requests_go_where_dynamo_sends_them(
    golden: Whole, fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = Dynamo(Disaggregation.NEVER, draws())
    count = len(golden.cached)
    active = Counter(worker for worker, *_ in golden.active)
    reserved = [0] * count
    for worker, share, kind, other in golden.active:
        alone = "".join("b" if index == worker else "-" for index in range(count))
        policy.decide(prompt(spelled(share, kind, other)), fleet(count, alone, waiting=[99] * count), 0.0)
        reserved[worker] += (share + other) * 16
    candidates = fleet(
        count,
        queued_prefill_tokens=golden.queued,
        waiting=[active[index] for index in range(count)],
        reserved_kv_tokens=reserved,
        **cache_columns(golden.cached),
    )
    plan = policy.decide(prompt(range(golden.tokens // 16), golden.tokens), candidates, 1.0)
    assert plan is not None
    assert plan.tables[0].values[:, 1].tolist() == golden.decode
    assert plan.decode.worker_id == f"w{golden.chosen}"


@pytest.mark.parametrize("golden", PREFILL)
def test_prompts_go_where_dynamos_prefill_router_sends_them(
    golden: Prefill, fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    count = len(golden.cached)
    candidates = fleet(
        count + 1,
        "p" * count + "d",
        queued_prefill_tokens=[*golden.queued, 0],
        reserved_kv_tokens=[1_600 if index == golden.chosen else 0 for index in range(count + 1)],
        **cache_columns(golden.cached, extra=1),
    )
    policy = Dynamo(Disaggregation.ALWAYS, draws())
    plan = policy.decide(prompt(range(golden.tokens // 16), golden.tokens), candidates, 0.0)
    assert plan is not None
    assert plan.prefill is not None
    assert plan.prefill.worker_id == f"w{golden.chosen}"


@pytest.mark.parametrize("golden", DECODE)
def test_outputs_go_where_dynamos_decode_router_sends_them(
    golden: Decode, fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    count = len(golden.reserved)
    candidates = fleet(
        count + 1,
        "d" * count + "p",
        reserved_kv_tokens=[*(blocks * 16 for blocks in golden.reserved), 0],
        **cache_columns(golden.cached, extra=1),
    )
    plan = Dynamo(Disaggregation.ALWAYS, draws()).decide(prompt(range(8)), candidates, 0.0)
    assert plan is not None
    assert plan.decode.worker_id == f"w{golden.chosen}"


def test_output_goes_where_the_fewest_blocks_are_reserved(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    candidates = fleet(4, "pddd", reserved_kv_tokens=[0, 640, 160, 320], streams=[0, 1, 9, 1])
    plan = Dynamo(Disaggregation.ALWAYS, draws()).decide(prompt(range(4)), candidates, 0.0)
    assert plan is not None
    assert plan.decode.worker_id == "w2"
    assert plan.tables[1].values.tolist() == [[40.0, 4.0], [10.0, 4.0], [20.0, 4.0]]


@pytest.mark.parametrize("in_flight", [3, 1, 0])
def test_blocks_of_requests_that_must_have_ended_are_not_shared(
    in_flight: int, fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = Dynamo(Disaggregation.NEVER, draws())
    for _ in range(3):
        policy.decide(prompt(range(8)), fleet(2, "b-", waiting=[9, 0]), 0.0)
    candidates = fleet(2, waiting=[in_flight, 0], reserved_kv_tokens=[in_flight * 128, 0])
    plan = policy.decide(prompt([*range(8), "more"]), candidates, 1.0)
    assert plan is not None
    # However many of the three run, they hold the same 8 blocks, and this request adds one to them.
    assert plan.tables[0].values[:, 1].tolist() == [9.0, 9.0]


def test_a_temperature_draws_with_softmax_weights(fleet: Fleet, prompt: Prompt) -> None:
    policy = Dynamo(Disaggregation.NEVER, random.Random(1), temperature=0.5)
    candidates = fleet(3, queued_prefill_tokens=[0, 160, 320], waiting=[9, 9, 9])
    chosen = Counter(
        plan.decode.worker_id
        for index in range(4_000)
        if (plan := policy.decide(prompt([(index, "once")]), candidates, 0.0)) is not None
    )
    # Costs 0, 1/2 and 1 of the range at temperature 1/2: weights 1, e**-1 and e**-2.
    weights = np.exp([0.0, -1.0, -2.0])
    for worker, share in zip(("w0", "w1", "w2"), weights / weights.sum(), strict=True):
        assert chosen[worker] / 4_000 == pytest.approx(share, abs=0.03)


def test_prefill_counts_as_much_as_its_scale(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    candidates = fleet(2, tier_tokens=[[64, 0, 0], [0, 0, 0]])
    plain = Dynamo(Disaggregation.NEVER, draws())
    scaled = Dynamo(Disaggregation.NEVER, draws(), prefill_load_scale=4.0)
    plans = [policy.decide(prompt(range(8)), candidates, 0.0) for policy in (plain, scaled)]
    prefill = [plan.tables[0].values[:, 0].tolist() for plan in plans if plan is not None]
    assert prefill == [[5.0, 8.0], [20.0, 32.0]]
