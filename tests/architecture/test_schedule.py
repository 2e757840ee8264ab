"""Which process of pytest-xdist gets which tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.suite.schedule import GroupScheduling, is_slow, order_of

SLOW = "tests/e2e/test_auto_disaggregation.py::test_a"
FAST = tuple(f"tests/architecture/test_{name}.py::test_a" for name in ("folders", "imports", "makefile"))
SHORT_SLOW = tuple(f"tests/e2e/test_{name}.py::test_a" for name in ("edges", "verify"))


@dataclass(eq=False)
class Node:
    """A process, and the tests that it was given."""

    name: str
    collection: list[str]
    tests: list[str] = field(default_factory=list)
    shutting_down: bool = False

    @property
    def gateway(self) -> Any:
        return SimpleNamespace(id=self.name)

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.tests += [self.collection[index] for index in indexes]

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def nodes() -> list[Node]:
    """Three processes, which have run all tests."""
    config = SimpleNamespace(
        getvalue=lambda name: ["3*popen"], option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling = GroupScheduling(config, log=None)
    collection = sorted([SLOW, *FAST, *SHORT_SLOW], key=order_of)
    made = [Node(f"gw{number}", collection) for number in range(3)]
    for node in made:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, collection)
    scheduling.schedule()
    done: set[str] = set()
    while scheduling.has_pending:
        for node in made:
            for test in [test for test in node.tests if test not in done]:
                done.add(test)
                scheduling.mark_test_complete(node, collection.index(test))
    return made


def test_every_test_is_run_once(nodes: list[Node]) -> None:
    run = [test for node in nodes for test in node.tests]
    assert sorted(run) == sorted([SLOW, *FAST, *SHORT_SLOW])


def test_the_first_process_gets_no_slow_test_and_the_others_get_these_first(nodes: list[Node]) -> None:
    first, *others = nodes
    assert first.tests
    assert not [test for test in first.tests if is_slow(test)]
    for node in others:
        slow = [is_slow(test) for test in node.tests]
        assert slow == sorted(slow, reverse=True)
