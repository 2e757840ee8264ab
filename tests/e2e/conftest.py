"""The product as a user starts it: `kvasir up`, real Ray Serve, real vLLM, real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.gateway.otlp_collector import Collector, collector
from tests.kit.shared.deployments import DEFAULT, OPERATOR, SEVERAL_MODELS, StackRegistry, speaking
from tests.kit.stack import Stack, check_rest, start_stack
from tests.kit.suite.schedule import GroupEnds


@pytest.fixture(scope="session")
def running_stacks() -> list[Stack]:
    """The stacks that run, of which the longest-lived come first."""
    return []


@pytest.fixture(scope="session", name="start_stack")
def start_stack_fixture(
    running_stacks: list[Stack],
) -> Callable[..., contextlib.AbstractContextManager[Stack]]:
    """Starts `kvasir up` in a given home with more arguments. A test that succeeds leaves it at rest; with
    `secure` that is left to the test."""

    @contextlib.contextmanager
    def started(home: Path, *arguments: str, secure: bool = False, **options: Any) -> Iterator[Stack]:
        with start_stack(home, *arguments, **options) as running:
            if secure:
                # Its pages ask for certificates that its test has, which looks at them itself.
                yield running
                return
            running_stacks.append(running)
            try:
                yield running
                check_rest(running)
            finally:
                running_stacks.remove(running)

    return started


@pytest.fixture(scope="session")
def traces() -> Iterator[Collector]:
    """The collector to which `stack` sends its spans."""
    with collector() as made:
        yield made


@pytest.fixture(scope="session")
def stack_registry(
    start_stack: Callable[..., contextlib.AbstractContextManager[Stack]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StackRegistry]:
    """Its deployments end with the session at the latest: the last tests of a group need not ask for them."""
    made = StackRegistry(start_stack, lambda: tmp_path_factory.mktemp("shared"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def stacks(stack_registry: StackRegistry, group_ends: GroupEnds) -> Iterator[StackRegistry]:
    """The deployments that run, by their spec."""
    yield stack_registry
    if group_ends.now:
        stack_registry.stop()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which `stack` loads adapters."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def stack(stacks: StackRegistry, traces: Collector, adapters: Path) -> Stack:
    """The embedded default, prefill and decode apart, with an adapter and traces."""
    return stacks.running(DEFAULT.replace("COLLECTOR", traces.address).replace("ADAPTERS", str(adapters)))


@pytest.fixture(scope="module")
def models(stacks: StackRegistry) -> Stack:
    """Several models, of simulated engines and of one that embeds."""
    return stacks.running(SEVERAL_MODELS)


@pytest.fixture(scope="session")
def speaking_spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    """See `speaking` of tests/kit/shared/deployments.py."""
    return speaking(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module", name="speaking")
def speaking_stack(stacks: StackRegistry, speaking_spec: str) -> Stack:
    """Tools, reasoning and tenants, on engines over one node and over two."""
    return stacks.running(speaking_spec, OPERATOR)


@pytest.fixture(autouse=True)
def invariants(request: pytest.FixtureRequest, running_stacks: list[Stack]) -> Iterator[None]:
    """After every test, on all stacks that go on running: nothing runs, is pinned or accounted, and no stream
    lost a token."""
    yield
    if request.node.get_closest_marker("stops_stack") is None:
        for running in running_stacks:
            check_rest(running)
