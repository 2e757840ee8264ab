"""Which tests run, how much of what can be scaled, and which tests share a process.

`make test` leaves out what is marked `soak`: a case of each kind stays. `make soak` (`pytest --soak`) runs
the marked tests, those that take the fixture `soak` and property tests, at the scale of a nightly job.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from tests.kit.durations import Durations
from xdist.scheduler.loadscope import LoadScopeScheduling

SHARED = {
    "tests/contract/test_engine.py": "contract engines",
    "tests/contract/test_engine_continuation.py": "contract engines",
    "tests/contract/test_engine_parsing.py": "contract engines",
    "tests/e2e/test_stack.py": "default deployment",
    "tests/e2e/test_deployments.py": "default deployment",
    "tests/e2e/test_responses_vllm.py": "default deployment",
    "tests/e2e/test_verify.py": "default deployment",
    "tests/e2e/gateway/test_surface_generation.py": "default deployment",
    "tests/e2e/gateway/test_anthropic_vllm.py": "default deployment",
    "tests/e2e/gateway/test_structured_limits.py": "default deployment",
    "tests/e2e/gateway/test_loaded_adapters.py": "default deployment",
}
"""Group of the files that share engines or a deployment; any other file is a group."""
SPREAD = ("tests/simulation/", "tests/helm/")
"""Folders whose tests share nothing that takes time to start: each test is a group."""
LONGEST = (
    "default deployment",
    "tests/e2e/test_engine_over_nodes.py",
    "tests/faults/test_scorecard_small.py",
    "tests/e2e/test_tiers_vllm.py",
    "tests/e2e/test_migration_vllm.py",
    "tests/e2e/test_ray_lifecycle.py",
    "tests/e2e/test_auto_disaggregation.py",
    "tests/contract/test_vllm_kv_events.py",
    "tests/e2e/test_prefill_decode_equality.py",
    "tests/e2e/test_scaling_live.py",
    "tests/e2e/gateway/test_surface_outputs.py",
    "tests/security/test_edge_rows.py",
    "contract engines",
    "tests/e2e/test_failed_start.py",
    "tests/e2e/test_models_and_embeddings.py",
    "tests/e2e/test_placement_on_nodes.py",
    "tests/e2e/test_engine_powers.py",
    "tests/faults/test_vllm_engine_death.py",
    "tests/e2e/test_model_kinds.py",
    "tests/e2e/test_up_over_https.py",
)
"""Groups that take more than half a minute, the longest first."""

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
    """Keep the tests of this run, unless one is named explicitly. The longest groups come first, so that both
    processes end together; a test that stops the shared deployment is the last of its group."""
    longest = {group: place for place, group in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (
            longest.get(group_of(item.nodeid), len(longest)),
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


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, so that an engine or a deployment that they
    share is started once."""
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith(SPREAD) else SHARED.get(file, file)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no type hints for it
    """Assigns groups of tests to processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


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
