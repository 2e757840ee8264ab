"""Which tests run, and how much of what can be scaled.

`make test` leaves out what is marked `soak`: a case of each kind stays. `make soak` (`pytest --soak`) runs
the marked tests, those that take the fixture `soak` and property tests, at the scale of a nightly job.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from tests.kit.durations import Durations

settings.register_profile("change", max_examples=30, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        action="store_true",
        help="run what belongs in a nightly job: tests marked soak, and scaled tests at full scale",
    )


def pytest_configure(config: pytest.Config) -> None:
    nightly = bool(config.getoption("--soak"))
    settings.load_profile("nightly" if nightly else "change")
    if not hasattr(config, "workerinput"):
        slow = config.getoption("markexpr") == "slow"
        config.pluginmanager.register(Durations("soak" if nightly else "slow" if slow else "fast"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this run, unless one was named: whoever names a test wants it to run."""
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
