"""Which tests run in which process of pytest-xdist.

Tests that start engines or deployments leave the cores idle for much of their time, and compute on all of
them while something starts. So two processes run these, and a third one with less priority runs the others.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[3]
LEAST_FOR_BOTH = 3
NICENESS = 5

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


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, so that an engine or a deployment that they
    share is started once."""
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith(SPREAD) else SHARED.get(file, file)


def is_slow(group: str) -> bool:
    """Whether a group has tests that start engines or deployments."""
    return group in SHARED.values() or _marks_slow(group.partition("::")[0])


@cache
def _marks_slow(file: str) -> bool:
    return "mark.slow" in (ROOT / file).read_text()


def order_of(group: str) -> tuple[int, bool]:
    """The longest groups come first, so that all processes end together; then the slow ones."""
    place = LONGEST.index(group) if group in LONGEST else len(LONGEST)
    return place, not is_slow(group)


def yield_to_slow_tests(worker: str, count: int) -> None:
    """Give this process less priority if it is the one for the other tests."""
    if count >= LEAST_FOR_BOTH and worker == "gw0":
        os.nice(NICENESS)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no type hints for it
    """Assigns groups of tests to processes. With three or more, the first one gets no slow group, and the
    others get every slow group before any other."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if (group := self._next_for(node)) is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: Any) -> str | None:
        waiting: list[str] = list(self.workqueue)
        if self.numnodes < LEAST_FOR_BOTH or node.gateway.id != "gw0":
            return waiting[0]
        # The others come to the end of the queue last.
        return next((group for group in reversed(waiting) if not is_slow(group)), None)
