"""The product as a user starts it: `kvasir up`, real Ray Serve, real vLLM, real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from tests.kit.gateway.otlp_collector import Collector, collector
from tests.kit.lab.invariants import invariant_violations
from tests.kit.stack import DEFAULT, Stack, start_stack


@pytest.fixture(scope="session", name="start_stack")
def start_stack_fixture() -> Callable[..., contextlib.AbstractContextManager[Stack]]:
    """Starts `kvasir up` in a given home with more arguments."""
    return start_stack


@pytest.fixture(scope="session")
def traces() -> Iterator[Collector]:
    """The collector to which `stack` sends its spans."""
    with collector() as made:
        yield made


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[Stack]:
    """The embedded default, prefill and decode apart, with an adapter and traces. Float32 and one thread make
    tokens comparable."""
    home = tmp_path_factory.mktemp("kvasir")
    spec = home / "kvasir.yaml"
    spec.write_text(DEFAULT.replace("COLLECTOR", traces.address))
    with start_stack(home, "-f", str(spec)) as running:
        yield running


@pytest.fixture(autouse=True)
def invariants(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the stack: nothing runs, is pinned or accounted, and no stream lost a token."""
    yield
    if "stack" not in request.fixturenames:
        return
    running: Stack = request.getfixturevalue("stack")
    if request.node.get_closest_marker("stops_stack") is not None:
        return
    left: list[str] = []

    def at_rest() -> bool:
        left[:] = invariant_violations(running.page("/status").json(), running.page("/metrics").text)
        return not left

    try:
        running.wait_until(at_rest, 30.0, "rest")
    except pytest.fail.Exception:
        pytest.fail(f"after the test there remain: {'; '.join(left)}")
