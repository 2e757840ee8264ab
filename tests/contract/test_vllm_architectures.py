"""Facts of vLLM and transformers that the check of a model folder needs: architectures, types, positions.

The tables are compared with the source text of both, which takes a second and imports neither.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint import architectures
from kvasir.checkpoint.architectures import KINDS, MULTIMODAL, PLUGINS, REMOVED, TRANSFORMERS
from kvasir.checkpoint.default_positions import DEFAULT_POSITIONS
from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.model_types import MODEL_TYPES, TYPED_BY_ARCHITECTURE

GENERATION = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")
POOLING = ("EMBEDDING", "LATE_INTERACTION")
SCORING = ("REWARD", "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


def assigned(where: Path | ast.ClassDef) -> dict[str, ast.expr]:
    """The expression that each name of a module or class is assigned."""
    found: dict[str, ast.expr] = {}
    body = ast.parse(where.read_text(encoding="utf-8")).body if isinstance(where, Path) else where.body
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def entries(expression: ast.expr) -> dict[str, str]:
    """The constant keys of a dict, or of a call that makes one, with the source of their values."""
    if isinstance(expression, ast.Call):
        found: dict[str, str] = {}
        for each in expression.keywords:
            found |= entries(each.value) if each.arg is None else {each.arg: ast.unparse(each.value)}
        return found
    if not isinstance(expression, ast.Dict):
        return {}
    pairs = zip(expression.keys, expression.values, strict=True)
    return {str(key.value): ast.unparse(value) for key, value in pairs if isinstance(key, ast.Constant)}


@pytest.fixture(scope="module")
def registry() -> dict[str, dict[str, str]]:
    names = assigned(package("vllm") / "model_executor" / "models" / "registry.py")
    tables = {
        name.strip("_").removesuffix("_MODELS"): entries(value)
        for name, value in names.items()
        if name.endswith("_MODELS") and name != "_VLLM_MODELS"
    }
    del tables["TRANSFORMERS_BACKEND"]
    return tables


def test_the_table_of_architectures_is_vllms_registry(registry: dict[str, dict[str, str]]) -> None:
    backed = registry["TRANSFORMERS_SUPPORTED"]
    several = {name for name, value in backed.items() if "MultiModal" in value} | set(registry["MULTIMODAL"])
    text = set(registry["TEXT_GENERATION"]) | (set(backed) - several)
    pooling = {name for table in POOLING for name in registry[table]} - text - several
    scoring = {name for table in SCORING for name in registry[table]}
    expected = (
        dict.fromkeys(registry["SPECULATIVE_DECODING"], "draft")
        | dict.fromkeys(scoring, "scoring")
        | dict.fromkeys(pooling, "pooling")
        | dict.fromkeys(text | several, "generation")
    )
    assert {name: kind for name, kind in KINDS.items() if name not in TRANSFORMERS} == expected
    assert several == MULTIMODAL


def test_what_vllm_does_not_run_any_more_is_known_with_the_reason(
    registry: dict[str, dict[str, str]],
) -> None:
    assert {name: f"{version!r}" for name, version in REMOVED.items()} == registry["PREVIOUSLY_SUPPORTED"]
    assert {name: f"{address!r}" for name, address in PLUGINS.items()} == registry["OOT_SUPPORTED"]


def test_suffixes_are_those_by_which_vllm_takes_architectures() -> None:
    value = assigned(package("vllm") / "config" / "model.py")["_SUFFIX_TO_DEFAULTS"]
    kinds = {"generate": "generation", "pooling": "pooling"}
    pairs = [(name, kinds[runner]) for name, (runner, _) in ast.literal_eval(value)]
    assert pairs == list(architectures._SUFFIXES)


def test_the_transformers_backend_runs_the_classes_that_are_listed(
    registry: dict[str, dict[str, str]],
) -> None:
    """As `PreTrainedModel.is_backend_compatible` and `_can_set_attn_implementation` judge a class, by the
    source of its module."""
    registered = {name for table in registry.values() for name in table} - set(REMOVED) - set(PLUGINS)
    found = set()
    for path in sorted((package("transformers") / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
        settable = attention is None or "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
        exported = re.search(r"__all__ = \[(.*?)\]", source, re.DOTALL)
        if exported and (settable or "_supports_attention_backend = True" in source):
            classes = set(re.findall(r"^class (\w+)\(", source, re.MULTILINE))
            found |= {name for name in re.findall(r'"(\w+)"', exported[1]) if name in classes}
    generating = {name for name in found if name.endswith(GENERATION) and not name.startswith("Auto")}
    assert generating - registered == TRANSFORMERS


def test_model_types_are_those_of_vllm_and_transformers() -> None:
    auto = package("transformers") / "models" / "auto"
    mapping = assigned(auto / "auto_mappings.py")["CONFIG_MAPPING_NAMES"]
    assert isinstance(mapping, ast.Call)
    types = {name for name, _ in ast.literal_eval(mapping.args[0])}
    for node in ast.walk(ast.parse((auto / "configuration_auto.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "CONFIG_MAPPING_NAMES.update":
            types |= set(entries(node.args[0]))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG_MAPPING_NAMES":
            types |= set(entries(node.value))
    config = assigned(package("vllm") / "transformers_utils" / "config.py")
    types |= set(entries(config["_CONFIG_REGISTRY"]))
    assert types == MODEL_TYPES
    assert set(entries(config["_ARCHITECTURE_TO_MODEL_TYPE"])) == TYPED_BY_ARCHITECTURE


def test_default_positions_are_those_of_transformers() -> None:
    found: dict[str, int] = {}
    for path in (package("transformers") / "models").glob("*/configuration_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                values = assigned(node)
                kind = values.get("model_type")
                stated = (values.get(key) for key in ("max_position_embeddings", "n_positions"))
                numbers = [int(ast.unparse(each)) for each in stated if isinstance(each, ast.Constant)]
                if isinstance(kind, ast.Constant) and numbers:
                    found[str(kind.value)] = numbers[0]
    assert found == DEFAULT_POSITIONS


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "max_position_embeddings": 4096},
    {"model_type": "llama", "max_position_embeddings": 8192, "rope_scaling": LLAMA3},
    {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": YARN},
    {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_scaling": LONG,
    },
    {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
    {"model_type": "gpt2", "n_positions": 1024},
    {"model_type": "gpt2"},
    {"model_type": "llama", "max_sequence_length": 1500},
    {"model_type": "gemma3", "text_config": {"num_hidden_layers": 4}},
    {"model_type": "paligemma", "text_config": {"model_type": "gemma", "vocab_size": 100}},
    {"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072},
    {"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 3000}},
    {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"max_position_embeddings": 5000}}},
]


@pytest.mark.slow
def test_positions_are_derived_as_vllm_derives_them(tmp_path: Path) -> None:
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import get_config, get_hf_text_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    for number, stated in enumerate(CONFIGS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(stated))
        config = get_config(str(folder), trust_remote_code=False)
        text = get_hf_text_config(config)
        converted = ModelArchConfigConvertorBase(config, text).convert()
        ours = read_model_config(folder)
        assert ours.max_positions is not None, stated
        for wanted, expected in ((None, ours.default_positions), (ours.max_positions, ours.max_positions)):
            assert _get_and_verify_max_len(text, converted, None, wanted, False, None) == expected, stated
        with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
            _get_and_verify_max_len(text, converted, None, ours.max_positions + 1, False, None)
