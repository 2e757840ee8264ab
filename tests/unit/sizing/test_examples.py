"""The models of the examples fit on the GPUs that the examples name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.config.load.loader import loads
from kvasir.config.load.yaml_document import parse, read_file
from kvasir.config.spec.deployment import Deployment
from kvasir.hardware.gpus import gpu_named
from kvasir.sizing.fit import Fit, fit, model_files, need_of
from kvasir.sizing.pools import rank_memory, shape_of

EXAMPLES = Path(__file__).parents[3] / "helm" / "kvasir" / "examples"
MODELS = {
    "Llama-3.1-8B-Instruct": models.LLAMA_8B,
    "Llama-3.3-70B-Instruct": models.LLAMA_70B,
    "Llama-3.1-405B-Instruct": models.LLAMA_405B,
    "Qwen3-8B": models.QWEN3_8B,
    "DeepSeek-V3": models.DEEPSEEK_V3,
}


def spec_of(name: str) -> Deployment:
    data: Any = parse(read_file(EXAMPLES / f"{name}.yaml"), name).data
    return loads(json.dumps(data["config"]), name)


def fits_of(name: str) -> list[Fit]:
    """Return how each pool of the first model fits on its GPU."""
    found = []
    (view, *_) = spec_of(name).views()
    values = MODELS[view.model.source.rsplit("/", 1)[-1]]
    files = model_files(models.config_of(values), models.tensors_of(values))
    for pool in view.pools:
        gpu = gpu_named(pool.gpu or "")
        assert gpu is not None, f"{name}: pool {pool.name} names no GPU"
        shape = shape_of(view, pool, max_model_len=view.model.context_length)
        found.append(fit(need_of(files, shape), rank_memory(pool, gpu.memory_bytes)))
    return found


@pytest.mark.parametrize(
    "name",
    [
        "autoscaled",
        "one-engine-two-nodes",
        "one-node-8-gpus",
        "rdma-prefill-decode",
        "small-gpus",
        "wide-experts-two-nodes",
    ],
)
def test_every_pool_of_an_example_has_room_for_several_of_its_longest_requests(name: str) -> None:
    for found in fits_of(name):
        assert found.missing == 0
        assert found.requests > 2


def test_the_page_states_the_kv_of_the_node_with_eight_gpus() -> None:
    assert round(min(found.free for found in fits_of("one-node-8-gpus")) / (1 << 30)) == 54
