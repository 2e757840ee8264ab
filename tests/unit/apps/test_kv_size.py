"""The size of a worker's KV cache, decided where it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit import public_models as models
from tests.kit.model_folder import write_model

from kvasir.config.load.loader import load
from kvasir.sizing.host import ENGINE_BYTES
from kvasir_platform.apps.common import kv_size
from kvasir_platform.apps.common.kv_size import with_kv_size

GIB = 1 << 30
ONE_REQUEST = 4096 * (128 << 10)
WEIGHTS = 16_060_522_496


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {each.name: (each.dtype, each.shape) for each in models.tensors_of(models.LLAMA_8B)}
    return write_model(tmp_path_factory.mktemp("models") / "m", models.LLAMA_8B, tensors)


def size(source: Path, *overrides: str, free: int, alone: bool = False) -> Any:
    deployment = load(None, [f"model.source={source}", *overrides])
    view = deployment.view_of("decode")
    return (
        with_kv_size(deployment, view, "decode", free=free, alone=alone).pool("decode").engine.kv_cache_bytes
    )


def test_replicas_of_a_machine_share_its_memory(source: Path) -> None:
    free = 4 * (WEIGHTS + ENGINE_BYTES + 2 * GIB)
    assert size(source, "pools.prefill.replicas=3", free=free) == GIB
    assert size(source, free=free) == 8 * ONE_REQUEST


def test_a_replica_that_is_alone_in_its_pod_has_all_of_it(source: Path) -> None:
    free = WEIGHTS + ENGINE_BYTES + 2 * GIB
    assert size(source, "pools.prefill.replicas=3", free=free, alone=True) == GIB


def test_what_the_spec_says_is_kept(source: Path) -> None:
    assert size(source, "pools.decode.engine.kv_cache_bytes=2000000", free=64 * GIB) == 2_000_000


def test_weights_that_the_engine_does_not_read_from_safetensors_are_not_looked_for(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "m", models.LLAMA_8B)
    (bare / "model.safetensors").unlink()
    dummy = "pools.decode.engine.args={load_format: dummy}"
    others = "pools.prefill.engine.args={load_format: dummy}"
    assert size(bare, dummy, others, free=64 * GIB) == 8 * ONE_REQUEST


@pytest.mark.parametrize("other", ["pools.decode.gpus=1", "pools.decode.engine.kind=sim"])
def test_engines_that_are_not_on_the_cpu_size_it_themselves(source: Path, other: str) -> None:
    kinds = ["pools.prefill.engine.kind=sim"] if "sim" in other else []
    assert size(source, other, *kinds, free=64 * GIB) is None


def test_weights_in_object_storage_count_as_their_index_states(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = write_model(tmp_path / "local", models.LLAMA_8B)
    index = {"metadata": {"total_size": WEIGHTS}, "weight_map": {}}
    (local / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(kv_size, "resolve_model", lambda *_: local)
    free = 4 * (WEIGHTS + ENGINE_BYTES + 2 * GIB)
    streamed = "model.source=s3://bucket/llama"
    assert size(source, streamed, "pools.prefill.replicas=3", free=free) == GIB
