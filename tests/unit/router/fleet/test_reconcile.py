"""Predicted and found tokens: noise is tolerated, and a worker whose caches differ from the index is
reported."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.kv import KvState
from kvasir_router.fleet.reconcile import ReconcileLimits, Reconciler, Verdict
from kvasir_router.index import IndexViewId

EXACT = IndexViewId(KvState.EXACT, 1, 0)
PATIENCE = ReconcileLimits().patience


def judge(
    reconciler: Reconciler,
    predicted: int,
    found: int,
    *,
    prompt: int = 1000,
    picture: IndexViewId = EXACT,
    remote: int = 0,
) -> Verdict | None:
    # An equal one, as the index makes one at each call.
    same = replace(picture)
    return reconciler.observe(
        "w", same, prompt_tokens=prompt, predicted=predicted, found=found, remote=remote
    )


def first_verdict(
    reconciler: Reconciler, predicted: int, found: int, most: int
) -> tuple[int, Verdict] | None:
    for number in range(1, most + 1):
        verdict = judge(reconciler, predicted, found)
        if verdict is not None:
            return number, verdict
    return None


def test_a_worker_that_never_hits_what_was_foreseen_is_named_after_so_many_requests() -> None:
    found = first_verdict(Reconciler(), 900, 0, 200)
    assert found is not None
    number, verdict = found
    assert number == PATIENCE
    assert verdict.void
    assert verdict.reason == (
        "predicted and found cached tokens differ by 90% of the prompt, as they have over 32 requests: "
        "recently 900 predicted and 0 found in each; it appears to cache nothing"
    )


def test_a_worker_that_turns_bad_is_named_soon_however_long_it_was_good() -> None:
    reconciler = Reconciler()
    assert first_verdict(reconciler, 900, 900, 10_000) is None
    found = first_verdict(reconciler, 900, 100, 10_000)
    assert found is not None
    assert found[0] <= 2 * PATIENCE
    assert not found[1].void


def test_hits_that_nobody_foresaw_are_errors_too() -> None:
    found = first_verdict(Reconciler(), 0, 640, 200)
    assert found is not None
    assert not found[1].void


@pytest.mark.parametrize("found", [200, 550, 900])
def test_what_a_remote_store_has_dropped_is_not_held_against_the_worker(found: int) -> None:
    reconciler = Reconciler()
    for _ in range(200):
        assert judge(reconciler, 900, found, remote=700) is None
    assert reconciler.errors("w").ratio == 0.0


@pytest.mark.parametrize(("found", "wrong"), [(0, 200), (1000, 100)])
def test_what_is_missing_beyond_that_is_an_error_of_so_much(found: int, wrong: int) -> None:
    reconciler = Reconciler()
    judge(reconciler, 900, found, remote=700)
    assert reconciler.errors("w").tokens == wrong


def test_the_verdict_is_given_once() -> None:
    reconciler = Reconciler()
    assert first_verdict(reconciler, 900, 0, 200) is not None
    assert first_verdict(reconciler, 900, 0, 200) is None


@pytest.mark.parametrize(
    "picture",
    [
        IndexViewId(KvState.EXACT, 2, 0),
        IndexViewId(KvState.EXACT, 1, 1),
        IndexViewId(KvState.PREDICTED, 1, 0),
    ],
    ids=["next epoch", "after a resync", "no longer believed"],
)
def test_another_picture_of_the_worker_is_judged_anew(picture: IndexViewId) -> None:
    reconciler = Reconciler()
    for _ in range(PATIENCE - 1):
        assert judge(reconciler, 900, 0) is None
    assert judge(reconciler, 900, 900, picture=picture) is None
    assert reconciler.errors("w").ratio == 0.0
    for _ in range(PATIENCE):
        assert judge(reconciler, 900, 900, picture=picture) is None


def test_requests_that_promise_nothing_are_not_judged() -> None:
    reconciler = Reconciler()
    judge(reconciler, 0, 0)
    judge(reconciler, 0, 0, prompt=0)
    judge(reconciler, 900, 0, picture=IndexViewId(KvState.CATCHING_UP, 1, 0))
    assert reconciler.errors("w").requests == 0


def test_the_record_counts_tokens_and_is_forgotten_with_the_session() -> None:
    reconciler = Reconciler()
    judge(reconciler, 320, 300)
    judge(reconciler, 0, 40)
    errors = reconciler.errors("w")
    assert (errors.requests, errors.tokens) == (2, 60)
    assert errors.ratio == pytest.approx((0.02 * (1 - 1 / 32) + 0.04) / (2 - 1 / 32))
    reconciler.forget("w")
    assert reconciler.errors("w").requests == 0


def test_workers_are_judged_apart() -> None:
    reconciler = Reconciler()
    for number in range(200):
        worker = "good" if number % 2 else "bad"
        found = 900 if number % 2 else 0
        verdict = reconciler.observe(worker, EXACT, prompt_tokens=1000, predicted=900, found=found)
        assert verdict is None or worker == "bad"
    assert reconciler.errors("good").ratio == 0.0


def test_bad_spells_that_pass_are_not_added_up() -> None:
    reconciler = Reconciler()
    above = 0
    for _ in range(20):
        for number in range(150):
            assert judge(reconciler, 1000, 0 if number >= 140 else 1000) is None
            above += reconciler.errors("w").ratio > ReconcileLimits().threshold
    assert above > PATIENCE


@given(
    st.lists(
        st.tuples(st.integers(9, 40), st.lists(st.integers(0, 50), min_size=1, max_size=40)),
        min_size=1,
        max_size=60,
    ),
    st.booleans(),
)
def test_a_good_worker_is_never_demoted_for_its_noise(
    spells: list[tuple[int, list[int]]], begins_badly: bool
) -> None:
    # At most one request in nine is wholly wrong, and the others are off by up to 5 % of the prompt.
    reconciler = Reconciler()
    if begins_badly:
        assert judge(reconciler, 1000, 0) is None
    for quiet, errors in spells:
        for number in range(quiet - 1):
            assert judge(reconciler, 500, 500 + errors[number % len(errors)]) is None
        assert judge(reconciler, 1000, 0) is None


@given(st.integers(0, 2**32))
def test_random_misses_of_one_in_twenty_are_noise(seed: int) -> None:
    reconciler, rng = Reconciler(), Random(seed)
    for _ in range(1000):
        found = 0 if rng.random() < 0.05 else 960
        assert judge(reconciler, 960, found) is None


@given(st.integers(0, 2**32), st.integers(0, 300))
def test_a_worker_that_misses_every_other_hit_is_always_found_out(seed: int, good: int) -> None:
    reconciler, rng = Reconciler(), Random(seed)
    for _ in range(good):
        judge(reconciler, 960, 960)
    verdicts = [judge(reconciler, 960, 0 if rng.random() < 0.5 else 960) for _ in range(300)]
    (verdict,) = [each for each in verdicts if each is not None]
    assert not verdict.void
