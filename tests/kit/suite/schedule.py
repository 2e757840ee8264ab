"""Which tests run in which process of pytest-xdist.

Tests that share an engine or a deployment stay in one, so that it is started once.
"""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

SHARED = {
    "tests/contract/test_engine.py": "contract engines",
    "tests/contract/test_engine_continuation.py": "contract engines",
    "tests/contract/test_engine_parsing.py": "contract engines",
    "tests/e2e/test_stack.py": "default deployment",
    "tests/e2e/test_auto_disaggregation.py": "default deployment",
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
    "tests/faults/test_scorecard_small.py",
    "tests/e2e/test_tiers_vllm.py",
    "tests/contract/test_vllm_kv_events.py",
    "tests/e2e/test_engine_over_nodes.py",
    "tests/e2e/test_ray_lifecycle.py",
    "tests/e2e/test_prefill_decode_equality.py",
    "tests/security/test_edge_rows.py",
    "tests/e2e/test_models_and_embeddings.py",
    "tests/e2e/test_scaling_live.py",
    "tests/fuzz/test_openapi.py",
    "contract engines",
    "tests/e2e/gateway/test_surface_outputs.py",
    "tests/e2e/test_engine_powers.py",
    "tests/e2e/test_edges.py",
    "tests/e2e/test_placement_on_nodes.py",
    "tests/unit/transfer/test_nccl_faults.py",
    "tests/e2e/test_failed_start.py",
    "tests/helm/test_processes.py::test_what_the_chart_renders_streams_a_completion",
    "tests/faults/test_vllm_engine_death.py",
    "tests/e2e/test_model_kinds.py",
    "tests/e2e/test_up_over_https.py",
    "tests/simulation/test_admission.py::test_a_greedy_tenant_does_not_slow_another_down",
    "tests/contract/test_adapters_against_vllm.py",
    "tests/contract/test_discovery.py",
    "tests/unit/native/test_prefix_tree.py",
    "tests/contract/test_vllm_connector_hooks.py",
    "tests/security/test_http.py",
    "tests/e2e/test_kubernetes_discovery.py",
)
"""Groups that take longer than ten seconds, the longest first: one of them at the end would leave a process
idle. `build/test-durations-slow.txt` has what each takes."""


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, so that an engine or a deployment that they
    share is started once."""
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith(SPREAD) else SHARED.get(file, file)


def place_of(group: str) -> int:
    """The longest groups come first, so that all processes end together."""
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no type hints for it
    """Assigns groups of tests to processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
