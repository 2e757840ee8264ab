"""Which tests run in which process of pytest-xdist, and in which order.

Tests that share an engine or a deployment stay in one, next to each other, so that it is started once and
stopped before others start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

SHARED = {
    "tests/e2e/test_engine_output_rules.py": "engines",
    "tests/contract/test_engine.py": "engines",
    "tests/contract/test_engine_continuation.py": "engines",
    "tests/contract/test_engine_parsing.py": "engines",
    "tests/e2e/test_prefill_decode_equality.py": "engines",
    "tests/e2e/test_model_kinds.py": "engines",
    "tests/e2e/test_engine_powers.py": "engines",
    "tests/faults/test_vllm_engine_death.py": "engines",
    "tests/e2e/test_stack.py": "default deployment",
    "tests/e2e/test_auto_disaggregation.py": "default deployment",
    "tests/e2e/test_deployments.py": "default deployment",
    "tests/e2e/test_responses_vllm.py": "default deployment",
    "tests/e2e/test_verify.py": "default deployment",
    "tests/e2e/test_worker_spans.py": "default deployment",
    "tests/e2e/gateway/test_surface_generation.py": "default deployment",
    "tests/e2e/gateway/test_anthropic_vllm.py": "default deployment",
    "tests/e2e/gateway/test_structured_limits.py": "default deployment",
    "tests/e2e/gateway/test_loaded_adapters.py": "default deployment",
    "tests/e2e/gateway/test_adapter_slots.py": "default deployment",
    "tests/e2e/test_engine_over_nodes.py": "speaking deployment",
    "tests/e2e/gateway/test_surface_outputs.py": "speaking deployment",
    "tests/e2e/test_models_and_embeddings.py": "several models",
    "tests/e2e/test_scaling_live.py": "several models",
    "tests/e2e/test_ray_lifecycle.py": "several models",
}
"""Group of the files that share engines or a deployment, in their order; any other file is a group."""
SPREAD = ("tests/simulation/", "tests/helm/")
"""Folders whose tests share nothing that takes time to start: each test is a group."""
LONGEST = (
    "default deployment",
    "tests/faults/test_scorecard_small.py",
    "engines",
    "several models",
    "speaking deployment",
    "tests/security/test_edge_rows.py",
    "tests/fuzz/test_openapi.py",
    "tests/e2e/test_edges.py",
    "tests/e2e/test_up_over_https.py",
    "tests/e2e/test_placement_on_nodes.py",
    "tests/faults/test_vllm_errors.py",
    "tests/e2e/test_tiers_vllm.py",
    "tests/contract/test_vllm_kv_events.py",
    "tests/e2e/test_failed_start.py",
    "tests/helm/test_processes.py::test_what_the_chart_renders_streams_a_completion",
    "tests/simulation/test_admission.py::test_a_greedy_tenant_does_not_slow_another_down",
    "tests/contract/test_discovery.py",
    "tests/unit/native/test_prefix_tree.py",
    "tests/contract/test_vllm_connector_hooks.py",
    "tests/security/test_http.py",
    "tests/unit/transfer/test_nccl_faults.py",
    "tests/e2e/test_kubernetes_discovery.py",
)
"""Groups that take longer than ten seconds, in the order in which they begin: one of them at the end would
leave a process idle. The longest are the first. Groups that wait for most of their time, as those of
simulated engines do, run beside those that compute. `build/test-durations-slow.txt` has what each takes."""


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, so that an engine or a deployment that they
    share is started once."""
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith(SPREAD) else SHARED.get(file, file)


def place_of(group: str) -> int:
    """The longest groups come first, so that all processes end together."""
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


def order_of(item: pytest.Item) -> tuple[int, bool, int]:
    """Groups in their order, and in a group the files; a test that stops what they share is the last."""
    group, file = group_of(item.nodeid), item.nodeid.partition("::")[0]
    stops = item.get_closest_marker("stops_stack") is not None
    return place_of(group), stops, list(SHARED).index(file) if file in SHARED else 0


def may_be_slow(file: Path) -> bool:
    """Whether a file has tests marked slow, by itself, by fixtures beside it, or by the tokenizers of
    tests/kit/gateway/tokenizer_families.py. A run of slow tests imports no others."""
    beside = file.with_name("conftest.py")
    texts = [each.read_text() for each in (file, beside) if each.exists()]
    return any(mark in text for text in texts for mark in ("mark.slow", "tokenizer_families"))


class GroupEnds:
    """Knows whether the test that ends is the last of its group in this process."""

    def __init__(self) -> None:
        self.now = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Compare with the group of the next test."""
        self.now = nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no type hints for it
    """Assigns groups of tests to processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
