"""Session affinity, one request after another with a table of four sessions.

`GOLDENS`: the session, which places are offered, their load, the place, and whether it is the remembered
one. Worked out with a dictionary in the order of use: a session that is known, and whose place is offered,
goes there; any other goes to the least loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.session import StickySession

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS = [
    ("e", "b-b", [1, 7, 5], 0, False),
    ("f", "b-b", [2, 0, 6], 0, False),
    ("b", "bbb", [6, 3, 8], 1, False),
    ("c", "bbb", [2, 8, 0], 2, False),
    ("c", "bbb", [5, 7, 6], 2, True),
    ("d", "b-b", [7, 4, 0], 2, False),
    ("d", "bb-", [0, 5, 1], 0, False),
    ("b", "bb-", [5, 0, 7], 1, True),
    ("b", "b-b", [6, 0, 2], 2, False),
    ("d", "bbb", [6, 5, 8], 0, True),
    ("f", "bb-", [1, 5, 4], 0, True),
    ("b", "bbb", [2, 1, 6], 2, True),
    ("e", "bbb", [5, 6, 0], 2, False),
    ("f", "bb-", [4, 8, 1], 0, True),
    ("a", "bbb", [3, 0, 2], 1, False),
    ("e", "bbb", [1, 6, 4], 2, True),
    ("c", "-bb", [8, 1, 6], 1, False),
    ("b", "bbb", [2, 8, 6], 0, False),
    ("f", "bbb", [1, 5, 4], 0, False),
    ("d", "b-b", [1, 3, 6], 0, False),
    ("d", "bb-", [2, 5, 7], 0, True),
    ("e", "bb-", [4, 7, 6], 0, False),
    ("a", "bbb", [0, 2, 4], 0, False),
    ("a", "-bb", [3, 5, 4], 2, False),
]


def test_sessions_stay_until_they_are_forgotten_or_their_place_is_gone(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    policy = StickySession(Disaggregation.NEVER, draws(), sessions=4)
    for number, (session, roles, load, chosen, sticky) in enumerate(GOLDENS):
        plan = policy.decide(prompt("a", session=session), fleet(3, roles, streams=load), 0.0)
        assert plan is not None
        assert plan.decode.worker_id == f"w{chosen}", number
        assert plan.reason == ("session_sticky" if sticky else "session"), number


def test_without_a_session_the_first_block_names_it(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = StickySession(Disaggregation.NEVER, draws())
    first = policy.decide(prompt("ab"), fleet(2, streams=[1, 0]), 0.0)
    same = policy.decide(prompt("ac"), fleet(2, streams=[0, 9]), 0.0)
    other = policy.decide(prompt("ba"), fleet(2, streams=[0, 9]), 0.0)
    assert first is not None
    assert same is not None
    assert other is not None
    assert (first.decode.worker_id, same.decode.worker_id, other.decode.worker_id) == ("w1", "w1", "w0")


def test_prompt_and_output_each_stay_where_they_were(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = StickySession(Disaggregation.ALWAYS, draws())
    first = policy.decide(prompt("a", session="s"), fleet(4, "ppdd", streams=[1, 0, 0, 1]), 0.0)
    again = policy.decide(prompt("a", session="s"), fleet(4, "ppdd", streams=[0, 9, 9, 0]), 0.0)
    assert first is not None
    assert again is not None
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
