"""Which tests run, how much of what can be scaled, and which tests share a process.

`make test` leaves out what is marked `soak`: a case of each kind stays. `make soak` (`pytest --soak`) runs
the marked tests, those that take the fixture `soak` and property tests, at the scale of a nightly job.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import settings
from tests.kit.suite.builds import Builds
from tests.kit.suite.durations import Durations
from tests.kit.suite.failures import Failures
from tests.kit.suite.schedule import GroupEnds, GroupScheduling, may_be_slow, order_of
from tests.kit.suite.started import Starts

if TYPE_CHECKING:
    from tests.kit.shared.engines import EngineRegistry

    from kvasir.config.spec.deployment import Deployment

settings.register_profile("change", max_examples=30, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        action="store_true",
        help="run what belongs in a nightly job: tests marked soak, and scaled tests at full scale",
    )
    parser.addoption(
        "--failures",
        type=Path,
        metavar="FILE",
        help="with =: add what fails to FILE, and print at the end what runs before this one added",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Nothing that is imported and collected becomes garbage; see pytest_collection_finish.
    gc.disable()
    nightly = bool(config.getoption("--soak"))
    settings.load_profile("nightly" if nightly else "change")
    config.pluginmanager.register(GroupEnds(), "group-ends")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Builds(), "builds")
        file = config.getoption("--failures")
        failures = Failures(file) if file else None
        if failures is not None:
            config.pluginmanager.register(failures)
        config.pluginmanager.register(Durations("soak" if nightly else None, failures))
        config.pluginmanager.register(Starts())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have no slow tests where those alone are wanted."""
    alone = config.getoption("markexpr") == "slow" and collection_path.suffix == ".py"
    return True if alone and not may_be_slow(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this run, unless one is named explicitly. The longest groups come first, so that both
    processes end together; a test that stops the shared deployment is the last of its group."""
    items.sort(key=order_of)
    slow = {item.nodeid.partition("::")[0]: item.path for item in items if item.get_closest_marker("slow")}
    for file in sorted(file for file, path in slow.items() if not may_be_slow(path)):
        _fail_collection(config, file, "may_be_slow of tests/kit/suite/schedule.py misses its slow tests")
    if any("::" in argument for argument in config.args):
        return
    nightly = bool(config.getoption("--soak"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if _belongs(item, nightly=nightly) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Keep the garbage collector from the modules and the thousands of tests that were loaded: it would walk
    over them for a third of the time of tests that make many objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """Use GroupScheduling in place of `--dist loadgroup`."""
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def _belongs(item: pytest.Item, *, nightly: bool) -> bool:
    marked = item.get_closest_marker("soak") is not None
    if not nightly:
        return not marked
    return marked or "soak" in getattr(item, "fixturenames", ()) or _is_property(item)


def _fail_collection(config: pytest.Config, file: str, why: str) -> None:
    """End the run with an error of this file, which processes of pytest-xdist pass on (no exception is)."""
    config.hook.pytest_collectreport(report=pytest.CollectReport(file, "failed", why, []))


def _is_property(item: pytest.Item) -> bool:
    function = getattr(item, "obj", None)
    return getattr(function, "is_hypothesis_test", False) or "runTest" in item.name


@pytest.fixture(scope="session")
def group_ends(pytestconfig: pytest.Config) -> GroupEnds:
    """Says when the deployments and engines that a group of tests shares are stopped."""
    found = pytestconfig.pluginmanager.get_plugin("group-ends")
    assert isinstance(found, GroupEnds)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_registry() -> AsyncIterator[EngineRegistry]:
    """Its engines end with the session at the latest: the last tests of a group need not ask for them."""
    from tests.kit.shared.engines import EngineRegistry

    made = EngineRegistry()
    yield made
    await made.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(engine_registry: EngineRegistry, group_ends: GroupEnds) -> AsyncIterator[EngineRegistry]:
    """The engines of vLLM that run, by their spec."""
    yield engine_registry
    if group_ends.now:
        await engine_registry.stop()


@pytest.fixture(scope="session")
def over_nccl(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """The spec of that name in tests/kit/shared/specs.py."""
    from tests.kit.shared.specs import over_nccl

    pytest.importorskip("vllm")
    return over_nccl(tmp_path_factory.mktemp("over-nccl"))


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether this is a nightly run: what is counted (histories, seeds) is counted in full."""
    return bool(request.config.getoption("--soak"))
