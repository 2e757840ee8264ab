"""Properties of every policy of the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from kvasir.config.spec.deployment import RoutingSpec
from kvasir.ports.routing import Candidates, Plan, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers import PEERS

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]

COLUMNS = ("cached_tokens", "queued_prefill_tokens", "waiting", "streams", "reserved_kv_tokens")


def random_fleet(fleet: Fleet, seed: int) -> Candidates:
    """Two ranks to a worker here and there, any roles, any load; rates are positive."""
    rng = random.Random(seed)
    count = rng.randrange(0, 9)
    columns = {name: [rng.choice((0, 0, 1, 7, 16, 160, 5_000)) for _ in range(count)] for name in COLUMNS}
    roles = "".join(rng.choice("pdb-") for _ in range(count))
    made = fleet(count, roles or "", **columns, prefill_token_s=[1e-4] * count, step_stream_s=[1e-3] * count)
    return replace(
        made, worker=np.array([index // rng.choice((1, 2)) for index in range(count)], dtype=np.int64)
    )


def requests(prompt: Prompt, seed: int) -> list[RequestView]:
    rng = random.Random(seed)
    return [
        prompt(
            range(rng.choice((0, 1, 10))),
            tokens=rng.choice((1, 160, 170)),
            choices=rng.choice((1, 1, 2)),
            session=rng.choice(("", "s")),
        )
        for _ in range(6)
    ]


def test_the_table_has_every_peer_of_the_deployment_spec() -> None:
    names = set(get_args(RoutingSpec.model_fields["policy"].annotation))
    assert set(PEERS) == names - {"cost", "round_robin", "least_loaded"}
    assert all(make(Disaggregation.AUTO, random.Random(0)).name == name for name, make in PEERS.items())


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("mode", Disaggregation)
def test_a_plan_names_eligible_places_on_two_workers_and_repeats_itself(
    name: str, fleet: Fleet, prompt: Prompt, mode: Disaggregation
) -> None:
    for seed in range(40):
        twins = [PEERS[name](mode, random.Random(seed)) for _ in range(2)]
        for step, request in enumerate(requests(prompt, seed)):
            candidates = random_fleet(fleet, 100 * seed + step % 3)
            plan, again = (policy.decide(request, candidates, float(step)) for policy in twins)
            assert plan == again
            missing = twins[0].missing(
                candidates.prefills.tolist(), candidates.decodes.tolist(), candidates.worker.tolist()
            )
            assert (plan is None) == (missing is not None) or request.choices > 1
            if plan is not None:
                check(plan, candidates)


def check(plan: Plan, candidates: Candidates) -> None:
    decode = candidates.targets.index(plan.decode)
    assert candidates.decodes[decode]
    if plan.prefill is not None:
        prefill = candidates.targets.index(plan.prefill)
        assert candidates.prefills[prefill]
        assert candidates.worker[prefill] != candidates.worker[decode]
    assert [table.part for table in plan.tables] == (
        ["whole"] if plan.prefill is None else ["prefill", "decode"]
    )
    for table, chosen in zip(plan.tables, (plan.prefill_target, plan.decode), strict=False):
        assert candidates.targets.index(chosen) in table.rows
        assert table.values.shape == (len(table.rows), len(table.names))
        assert np.isfinite(table.values).all()


@pytest.mark.parametrize("name", PEERS)
def test_nothing_to_choose_from_is_no_plan(name: str, fleet: Fleet, prompt: Prompt) -> None:
    policy = PEERS[name](Disaggregation.ALWAYS, random.Random(0))
    assert policy.decide(prompt("ab"), fleet(0), 0.0) is None
    assert policy.decide(prompt("ab"), fleet(1), 0.0) is None
    assert policy.missing([True], [True], [0]) is not None
