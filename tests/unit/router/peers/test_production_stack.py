"""production-stack's prefix-aware decisions, recorded from its own trie.

`GOLDENS` is one run of vllm-project/production-stack's `HashTrie` (src/vllm_router/prefix/hashtrie.py), a
character standing for a chunk of 128: who is available, the prompt, the endpoints that the trie answers,
and which of them was drawn and inserted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.production_stack import ProductionStack

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS = [
    ("bb--", "ebg", [0, 1], 0),
    ("b-bb", "ec", [0], 0),
    ("bbbb", "ebgba", [0], 0),
    ("b-b-", "eba", [0], 0),
    ("--bb", "ebgbaca", [2, 3], 1),
    ("bbbb", "eba", [0], 0),
    ("-bb-", "e", [1, 2], 1),
    ("bbbb", "ebgbcc", [0, 3], 1),
    ("bbbb", "dbfceh", [0, 1, 2, 3], 2),
    ("bb--", "ebgc", [0], 0),
    ("bb-b", "cegc", [0, 1, 3], 1),
    ("-b-b", "eb", [3], 0),
    ("bbbb", "ec", [0], 0),
    ("bbbb", "eg", [0, 2, 3], 1),
    ("bbbb", "ebacb", [0], 0),
    ("bb-b", "dbb", [0, 1, 3], 1),
    ("bbbb", "ebab", [0], 0),
    ("bb-b", "defghb", [1], 0),
    ("b--b", "achh", [0, 3], 0),
    ("-bb-", "eab", [2], 0),
    ("b--b", "cfh", [0, 3], 0),
    ("bbbb", "ebca", [0, 3], 1),
    ("bbbb", "hg", [0, 1, 2, 3], 3),
    ("b--b", "ebacb", [0], 0),
    ("bbbb", "db", [1, 2], 1),
    ("bbbb", "ceg", [1], 0),
    ("bbbb", "hg", [3], 0),
    ("--bb", "af", [2, 3], 1),
    ("bbb-", "ebacb", [0], 0),
    ("bb-b", "ebba", [0, 3], 0),
    ("bbbb", "ebb", [0], 0),
    ("bbbb", "achh", [0], 0),
    ("bbbb", "dhdef", [1, 2], 1),
    ("-bbb", "ehga", [2, 3], 1),
    ("bbbb", "dc", [1, 2], 0),
    ("bbbb", "dhbcd", [2], 0),
    ("bbbb", "eadcbd", [2], 0),
    ("bbbb", "ccgc", [0, 1], 1),
    ("bb--", "ea", [0], 0),
    ("bbbb", "dcbab", [1], 0),
]


def test_forty_requests_in_a_row_find_the_places_that_the_trie_finds(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = ProductionStack(Disaggregation.NEVER, draws(*(draw for *_, draw in GOLDENS)))
    for number, (available, text, matched, draw) in enumerate(GOLDENS):
        plan = policy.decide(prompt(text), fleet(4, available), 0.0)
        assert plan is not None
        table = plan.tables[0]
        assert table.rows[table.values[:, 0] == 0].tolist() == matched, number
        assert plan.decode.worker_id == f"w{matched[draw]}", number


def test_load_does_not_count(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = ProductionStack(Disaggregation.NEVER, draws())
    first = policy.decide(prompt("abc"), fleet(3), 0.0)
    assert first is not None
    busy = [900 if target == first.decode else 0 for target in fleet(3).targets]
    again = policy.decide(prompt("abcdefgh"), fleet(3, streams=busy), 0.0)
    assert again is not None
    assert again.decode == first.decode


def test_memory_is_bounded_for_each_place(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = ProductionStack(Disaggregation.NEVER, draws(), max_tree_blocks=6)
    for number in range(60):
        policy.decide(prompt([(number, block) for block in range(4)]), fleet(2), 0.0)
    assert all(policy._tree.held(target) <= 6 for target in fleet(2).targets)
    assert len(policy._tree._holders) <= 12


def test_places_that_are_gone_are_forgotten_once_they_are_many(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = ProductionStack(Disaggregation.NEVER, draws())
    for number in range(9):
        policy.decide(prompt("abc"), fleet(9, "".join("b" if i == number else "-" for i in range(9))), 0.0)
    policy.decide(prompt("xyz"), fleet(2), 0.0)
    assert set(policy._tree._sent) <= set(fleet(2).targets)
