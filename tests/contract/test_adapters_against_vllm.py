"""The memory of slots for LoRA adapters, against the tensors that vLLM makes for them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.models.architectures import named
from tests.kit.models.maker import make_model
from tests.kit.suite.started import count_start

from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.tensors import read_tensors
from kvasir.config.load.loader import load
from kvasir.sizing.adapters import ADAPTED_EMBEDDINGS, WITHOUT_HEADS, adapter_bytes
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import weight_parts
from kvasir_workers.engines.vllm.setup.arguments import environment

pytestmark = pytest.mark.slow

SLOTS, RANK = 3, 16
_MEASURE = f"""
import json, sys, torch
from vllm import LLM

llm = LLM(
    model=sys.argv[1], dtype="float32", max_model_len=256, block_size=32, kv_cache_memory_bytes=16 << 20,
    enforce_eager=True, enable_lora=True, max_loras={SLOTS}, max_lora_rank={RANK}, max_num_seqs=4,
)

def held(model):
    found = {{}}
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            made = vars(module).get(name, ())
            for each in [made] if isinstance(made, torch.Tensor) else made:
                found[id(each)] = each.numel() * each.element_size()
    return sum(found.values())

print("HELD", json.dumps(llm.apply_model(held)))
"""


def _held_by_vllm(folder: Path) -> int:
    spec = load(None, [])
    variables = environment(spec, spec.pools[0], cpus=1, platform="cpu")
    count_start("engines of vLLM", "slots of adapters")
    allowed = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)],
        env={**os.environ, **variables, **allowed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for line in run.stdout.splitlines():
        if line.startswith("HELD "):
            (held,) = json.loads(line.removeprefix("HELD "))
            return int(held)
    raise AssertionError(run.stderr[-2000:])


# tests/e2e/gateway/test_adapter_slots.py has kvasir-tiny.
@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma2", "cohere2"])
def test_the_slots_take_the_bytes_of_vllms_tensors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    folder = make_model(named(name), tmp_path / name)
    config = read_model_config(folder)
    shape = EngineShape(dtype="float32", adapters=SLOTS, adapter_rank=RANK)
    (computed,) = adapter_bytes(config, weight_parts(config, read_tensors(folder)), shape)
    assert computed == _held_by_vllm(folder)


def test_the_architectures_with_adapted_embeddings_are_those_of_vllm() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    classes: dict[str, ast.ClassDef] = {}
    for path in Path(registry.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)

    def adapted(name: str) -> tuple[str, ...]:
        # The interface has an empty default.
        if name == "SupportsLoRA" or name not in classes:
            return ()
        for each in classes[name].body:
            assigned = isinstance(each, ast.AnnAssign | ast.Assign) and each.value
            if assigned and ast.unparse(each).startswith("embedding_modules"):
                return tuple(ast.literal_eval(assigned))
        return next(filter(None, (adapted(ast.unparse(base)) for base in classes[name].bases)), ())

    known = {name: adapted(made) for name, (_, made) in registry._TEXT_GENERATION_MODELS.items()}
    assert {name for name, modules in known.items() if modules} == ADAPTED_EMBEDDINGS
    assert {name for name, modules in known.items() if len(modules) == 1} == WITHOUT_HEADS
