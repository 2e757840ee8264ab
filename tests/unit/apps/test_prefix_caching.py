"""Where a worker has no prefix cache although the spec has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kit.model_folder import write_model

from kvasir.config.load.loader import load
from kvasir_platform.apps.common.prefix_caching import with_possible_caching

MAMBA = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def caches(folder: Path, raw: dict[str, Any], *options: str) -> bool:
    source = write_model(folder / "m", raw)
    pools = "pools=[{name: all, role: both}]"
    view = load(None, [f"model.source={source}", "disaggregation=never", pools, *options]).view_of("all")
    return with_possible_caching(view, "all").pool("all").engine.prefix_caching


def test_a_model_whose_states_a_cpu_cannot_keep_has_no_prefix_cache_there(tmp_path: Path) -> None:
    assert not caches(tmp_path, MAMBA)
    assert not caches(tmp_path / "lfm2", LFM2)


@pytest.mark.parametrize(
    ("raw", "options"),
    [(LLAMA, []), (MAMBA, ["pools.all.gpus=1"]), (MAMBA, ["pools.all.engine.kind=sim"])],
    ids=["attention", "GPU", "simulated"],
)
def test_any_other_worker_has_the_cache_of_its_spec(
    tmp_path: Path, raw: dict[str, Any], options: list[str]
) -> None:
    assert caches(tmp_path, raw, *options)
