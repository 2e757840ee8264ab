"""No body that is accepted keeps the event loop busy for long, whichever field holds the costly value."""

from __future__ import annotations

import contextlib
from collections import Counter

from tests.kit.lab.costly_bodies import KINDS, OverBudgetError, bodies, handled, work

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.json_size import MAX_CONTAINERS, MAX_VALUES

BUDGET = 1_000_000
"""Instructions: about 20 ms of a core."""


def test_the_costliest_value_of_every_field_is_within_the_budget_or_refused() -> None:
    over, kinds = [], Counter[str]()
    for name, kind, data in bodies():
        try:
            with contextlib.suppress(RequestError):
                work(lambda kind=kind, data=data: handled(kind, data), BUDGET)  # type: ignore[misc]
        except OverBudgetError:
            over.append(name)
        kinds[kind.__name__] += 1
    assert over == []
    assert set(kinds) == {kind.__name__ for kind in KINDS}
    assert kinds["ChatBody"] > 300


def test_what_is_no_bytecode_is_bounded_by_what_a_body_may_hold() -> None:
    assert MAX_CONTAINERS <= 1 << 15
    assert MAX_VALUES <= 1 << 19
