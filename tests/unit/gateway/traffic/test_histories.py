"""Whole rollouts of random requests in virtual time, with the counting and the decision that routers run."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from kvasir.config.spec.traffic.routes import CanarySpec
from kvasir_platform.gateway.traffic.outcomes import Outcome, PairedOutcomes
from kvasir_platform.gateway.traffic.rollout import RolloutState, decide

CANARY = CanarySpec(model="v2", step_s=0)
MOST = 20_000


def ends(seed: int, slower: float, spread: float, fails: float = 0.0) -> str:
    """The phase in which a rollout ends. Times are log-normal: `spread` is the deviation of the logarithm of
    TTFT, ITL has half of it."""
    rng, state, pairs = (
        random.Random(seed),
        RolloutState("running", run=1),
        PairedOutcomes(CANARY.max_slowdown),
    )
    counts: Counter[str] = Counter()
    for number in range(MOST):
        canary = rng.random() < state.share(CANARY)
        factor = slower if canary else 1.0
        ttft, itl = (factor * math.exp(rng.gauss(0, each)) for each in (spread, spread / 2))
        failed = canary and rng.random() < fails
        outcome = Outcome(True, False) if failed else Outcome(False, True, ttft, itl)
        pairs.add(outcome, canary=canary, step=state.step)
        if number % 100 == 99:
            counts.update(pairs.take())
            state = decide(CANARY, state, counts, float(number)) or state
            if not state.compares:
                break
    return state.phase


@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_an_equal_canary_is_promoted_in_every_history(spread: float) -> None:
    assert Counter(ends(seed, 1.0, spread) for seed in range(5)) == {"promoted": 5}


@pytest.mark.parametrize(("slower", "spread", "fails"), [(1.3, 0.2, 0.0), (1.3, 0.6, 0.0), (1.0, 0.4, 0.05)])
def test_a_worse_one_is_rolled_back_in_every_history(slower: float, spread: float, fails: float) -> None:
    assert Counter(ends(seed, slower, spread, fails) for seed in range(8)) == {"rolled_back": 8}
