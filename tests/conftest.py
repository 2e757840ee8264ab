"""Which tests run, how much of what can be scaled, and which tests share a process.

`make test` leaves out what is marked `soak`: a case of each kind stays. `make soak` (`pytest --soak`) runs
the marked tests, those that take the fixture `soak` and property tests, at the scale of a nightly job.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import settings
from tests.kit.suite.durations import Durations
from tests.kit.suite.schedule import GroupScheduling, group_of, place_of

settings.register_profile("change", max_examples=30, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        action="store_true",
        help="run what belongs in a nightly job: tests marked soak, and scaled tests at full scale",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Nothing that is imported and collected becomes garbage; see pytest_collection_finish.
    gc.disable()
    nightly = bool(config.getoption("--soak"))
    settings.load_profile("nightly" if nightly else "change")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations("soak" if nightly else None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this run, unless one is named explicitly. The longest groups come first, so that both
    processes end together; a test that stops the shared deployment is the last of its group."""
    items.sort(
        key=lambda item: (
            place_of(group_of(item.nodeid)),
            item.get_closest_marker("stops_stack") is not None,
        )
    )
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


def _is_property(item: pytest.Item) -> bool:
    function = getattr(item, "obj", None)
    return getattr(function, "is_hypothesis_test", False) or "runTest" in item.name


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether this is a nightly run: what is counted (histories, seeds) is counted in full."""
    return bool(request.config.getoption("--soak"))
