"""What blocks of a tier must have in common, and which arenas are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, TiersSpec
from kvasir.core.errors import ConfigError
from kvasir.core.identity import KvLayout
from kvasir_workers.tiers.setup import mark_of, open_store, shared_tier

LAYOUT = KvLayout(32, "float32", "axes-0123", 4, 4, 32, 131_072)


def folder(root: Path, name: str, weights: bytes = b"weights") -> Path:
    made = root / name
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(weights)
    return made


def test_weights_and_not_their_folder_decide_whose_blocks_are_read(tmp_path: Path) -> None:
    one, copy = folder(tmp_path, "one"), folder(tmp_path, "copy")
    other = folder(tmp_path, "other", b"weightz")
    mark = mark_of("m", "main", LAYOUT, one, {})
    assert mark_of("m", "main", LAYOUT, copy, {}) == mark
    adapter = {"a": str(copy)}
    marks = {
        mark,
        mark_of("m", "main", LAYOUT, other, {}),
        mark_of("n", "main", LAYOUT, one, {}),
        mark_of("m", "next", LAYOUT, one, {}),
        mark_of("m", "main", replace(LAYOUT, dtype="bfloat16"), one, {}),
        mark_of("m", "main", LAYOUT, one, adapter),
        mark_of("m", "main", LAYOUT, one, {"b": str(copy)}),
        mark_of("m", "main", LAYOUT, one, {"a": str(other)}),
        mark_of("m", "main", LAYOUT, one, {}, stages=2),
    }
    assert len(marks) == 9


def test_weights_that_differ_only_in_the_middle_of_a_file_are_others(tmp_path: Path) -> None:
    weights = bytearray(1 << 20)
    before = folder(tmp_path, "before", bytes(weights))
    weights[300_000:700_000] = b"\1" * 400_000
    after = folder(tmp_path, "after", bytes(weights))
    assert mark_of("m", "main", LAYOUT, before, {}) != mark_of("m", "main", LAYOUT, after, {})


def test_a_deployment_without_redis_shares_no_tier() -> None:
    assert shared_tier(None, b"mark") == ""


def test_an_engine_without_redis_loads_no_client_of_it() -> None:
    code = "import sys, kvasir_workers.tiers.setup; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_arena_for_too_few_blocks_is_refused_with_its_field() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.cpu\.bytes: .* raise it"):
        open_store(
            TiersSpec(cpu=CpuTierSpec(bytes=1 << 20)),
            replace(LAYOUT, layers=8, bytes_per_block=300_000),
            b"",
            float,
        )


def test_an_arena_has_as_many_slots_as_fit() -> None:
    layout = replace(LAYOUT, tensor_parallel_size=2)
    store, memory = open_store(TiersSpec(cpu=CpuTierSpec(bytes=3 << 20)), layout, b"", float)
    assert memory is not None
    assert (store.capacity, memory.slots, memory.slot_bytes) == (12, 12, 262_144)
    store.close()


def test_ranks_on_several_nodes_have_as_many_slots_and_no_memory_of_all_of_them() -> None:
    layout = replace(LAYOUT, tensor_parallel_size=2)
    spec = TiersSpec(cpu=CpuTierSpec(bytes=3 << 20))
    store, memory = open_store(spec, layout, b"", float, together=False)
    assert (store.capacity, memory) == (12, None)
    store.close()
    lower = spec.model_copy(update={"disk": DiskTierSpec(path="/kv")})
    with pytest.raises(ConfigError, match=r"engine\.nodes: 1"):
        open_store(lower, layout, b"", float, together=False)
