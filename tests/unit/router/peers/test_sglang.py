"""SGLang's cache-aware decisions, recorded from its own router.

`GOLDENS` is one run of sglang-router 0.3.2 from PyPI (`--policy cache_aware --balance-abs-threshold 1`, all
else by default) before three workers that answer when they are told to: the requests in flight at each
worker, the prompt (a character stands for a block) and the worker that it was sent to. The router had its
workers in the order 1, 0, 2, which decides ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.sglang import SglangCacheAware

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

ORDER = (1, 0, 2)

GOLDENS = [
    ([0, 0, 0], "yooqsgfzqputzfdo", 1),
    ([0, 0, 0], "yooqsgfzqputzfdcjaibaaddjah", 1),
    ([0, 1, 0], "yooqsgfzqpabhegibe", 1),
    ([0, 1, 0], "yooqbegbaadd", 1),
    ([0, 0, 0], "ncsugyvikc", 1),
    ([0, 0, 0], "ehwdab", 1),
    ([0, 1, 0], "oqgxye", 0),
    ([0, 1, 0], "yjead", 0),
    ([1, 1, 0], "dbegoiaytkjmcccg", 2),
    ([0, 1, 1], "yjhjcgccedjddc", 0),
    ([1, 1, 1], "oqgxbgabbaiedgeg", 1),
    ([1, 1, 1], "yoodh", 1),
    ([1, 2, 1], "ggxacinohb", 0),
    ([2, 1, 1], "yoochfi", 1),
    ([2, 2, 0], "lwjbatucpc", 2),
    ([2, 1, 1], "dbegoiaytkjmc", 2),
    ([2, 1, 2], "dbahjajggj", 1),
    ([2, 1, 2], "nxkmxwsooo", 1),
    ([2, 0, 2], "yooqsgfzqpabhegid", 1),
    ([1, 0, 2], "yooqsgfzqputcjdi", 1),
    ([1, 1, 2], "phkmvigunz", 1),
    ([1, 1, 2], "hskgeeplbw", 1),
    ([1, 2, 2], "opignm", 0),
    ([2, 2, 2], "yooqsgfzqputcjdbaej", 1),
    ([2, 3, 2], "yjhjcgccedjacghdaedcabh", 0),
    ([3, 3, 2], "cvggpifway", 2),
    ([3, 3, 3], "dbegoiaytkjmiijcgdbggchh", 2),
    ([3, 3, 4], "nxkmxwsooofhfdbbddgbei", 1),
    ([3, 3, 4], "oibah", 1),
    ([3, 4, 4], "yooqsgfg", 1),
    ([3, 5, 3], "peqxqv", 0),
    ([4, 5, 3], "peqxqvd", 2),
    ([4, 5, 4], "ufqqrijvmtgjerqi", 0),
    ([5, 5, 3], "yooqsgfzqputzi", 2),
    ([5, 5, 3], "yjeac", 2),
    ([5, 5, 4], "cvggphh", 2),
    ([5, 5, 5], "qkdgntaiew", 1),
    ([5, 5, 5], "yooqsgfzqpfdjh", 1),
    ([5, 6, 5], "ufqqrijvmig", 0),
    ([6, 6, 5], "frgurugqgrtsehxu", 2),
    ([6, 6, 5], "phkmdb", 1),
    ([6, 7, 4], "oqgxicdgabdj", 2),
    ([6, 7, 5], "wquykq", 2),
    ([6, 7, 5], "dabyrtqspe", 2),
    ([6, 6, 6], "vdsbevocyd", 1),
    ([6, 7, 6], "nxkmxwsfaadcghffgdj", 1),
    ([6, 8, 6], "ehwdabjjdijfee", 1),
    ([6, 8, 6], "ekrwlynyfm", 0),
    ([7, 7, 6], "ojade", 2),
    ([7, 7, 6], "wquycibgihdbgjab", 2),
    ([7, 7, 7], "cvggpifwad", 2),
    ([6, 7, 8], "hskgeeplbigijbhbijagc", 1),
    ([6, 8, 8], "ttbnpnjqmtjlqjpu", 0),
    ([7, 8, 8], "jaayhsbufnyvmbkx", 0),
    ([8, 8, 8], "czhnxpiyhb", 1),
    ([8, 9, 8], "ehtwdbtnod", 0),
    ([8, 9, 8], "yooqsgfzqputcjdgh", 1),
    ([8, 10, 8], "yxqejxehpd", 0),
    ([8, 10, 8], "iitvxswsgu", 0),
    ([8, 10, 8], "oqgxa", 0),
]


def test_sixty_requests_in_a_row_go_where_sglang_sends_them(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = SglangCacheAware(Disaggregation.NEVER, draws(), balance_abs_threshold=1)
    sent = []
    for load, text, _ in GOLDENS:
        plan = policy.decide(prompt(text), fleet(3, streams=[load[worker] for worker in ORDER]), 0.0)
        assert plan is not None
        sent.append(ORDER[int(plan.decode.worker_id[1:])])
    assert sent == [chosen for _, _, chosen in GOLDENS]


def test_the_run_covers_every_branch(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = SglangCacheAware(Disaggregation.NEVER, draws(), balance_abs_threshold=1)
    reasons = [
        plan.reason
        for load, text, _ in GOLDENS
        if (plan := policy.decide(prompt(text), fleet(3, streams=[load[w] for w in ORDER]), 0.0))
    ]
    counts = {reason: reasons.count(reason) for reason in set(reasons)}
    assert set(counts) == {"sglang_imbalanced", "sglang_cached", "sglang_shortest_queue"}
    assert min(counts.values()) >= 5


def decide(policy: SglangCacheAware, request: RequestView, candidates: Candidates) -> tuple[str, str]:
    plan = policy.decide(request, candidates, 0.0)
    assert plan is not None
    return plan.decode.worker_id, plan.reason


def test_a_fleet_is_imbalanced_only_beyond_both_thresholds(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    loads: list[tuple[Sequence[int], str]] = [
        ((64, 0), "sglang_cached"),  # 64 more, and the default asks for more than 64
        ((65, 0), "sglang_imbalanced"),
        ((200, 134), "sglang_cached"),  # 66 more, but not half as much again
        ((202, 134), "sglang_imbalanced"),
    ]
    for load, reason in loads:
        policy = SglangCacheAware(Disaggregation.NEVER, draws())
        decide(policy, prompt("abcd"), fleet(2))
        assert decide(policy, prompt("abcd"), fleet(2, streams=load)) == (
            "w0" if reason == "sglang_cached" else "w1",
            reason,
        )


def test_a_match_counts_only_above_the_threshold(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = SglangCacheAware(Disaggregation.NEVER, draws())
    decide(policy, prompt("abc"), fleet(2))
    busy = fleet(2, streams=[1, 0])
    assert decide(policy, prompt("abcDEFGHIJ"), busy) == ("w1", "sglang_shortest_queue")  # 3 of 10
    assert decide(policy, prompt("abcdefghi"), busy) == ("w0", "sglang_cached")  # 3 of 9


def test_what_was_sent_to_a_place_that_is_gone_is_forgotten(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = SglangCacheAware(Disaggregation.NEVER, draws())
    decide(policy, prompt("abcd"), fleet(3, "--b"))
    assert decide(policy, prompt("abcd"), fleet(2)) == ("w0", "sglang_cached")
    assert decide(policy, prompt("abcd"), fleet(3)) == ("w0", "sglang_cached")


def test_memory_is_bounded_for_each_place(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = SglangCacheAware(Disaggregation.NEVER, draws(), max_tree_blocks=8)
    for index in range(100):
        decide(policy, prompt([(index, block) for block in range(5)]), fleet(2, streams=[index % 2, 0]))
    candidates = fleet(2)
    tree = policy._trees["whole"]
    assert all(tree.held(target) <= 8 for target in candidates.targets)
    assert len(tree._holders) <= 16


@pytest.mark.parametrize("part", [0, 1])
def test_prompts_and_outputs_follow_their_own_trees(
    fleet: Fleet, prompt: Prompt, draws: Draws, part: int
) -> None:
    policy = SglangCacheAware(Disaggregation.ALWAYS, draws())
    first = policy.decide(prompt("abcd"), fleet(4, "ppdd", streams=[1, 0, 1, 0]), 0.0)
    again = policy.decide(prompt("abcde"), fleet(4, "ppdd", streams=[0, 1, 0, 1]), 0.0)
    assert first is not None
    assert again is not None
    assert (first.prefill, first.decode)[part] == (again.prefill, again.decode)[part]
    assert [table.part for table in again.tables] == ["prefill", "decode"]
