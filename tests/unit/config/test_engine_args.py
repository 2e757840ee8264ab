"""`engine.args`: vLLM's arguments by name, checked before vLLM is there."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from kvasir.config.checks.problems import Problem, SpecError
from kvasir.config.checks.vllm_args import VllmArgs
from kvasir.config.load.loader import dump, loads, schema
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.engine_args import KV_LAYOUT, OWNED

POOLS = """
disaggregation: never
pools:
- name: a
  role: both
  engine:
    args:
"""


def load_args(text: str, *overrides: str) -> Deployment:
    return loads(POOLS + "".join(f"      {line}\n" for line in text.splitlines()), "kvasir.yaml", overrides)


def problems(text: str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        load_args(text, *overrides)
    return caught.value.problems


GOOD = {
    "attention_backend": "FLASH_ATTN",
    "compilation_config": {"cudagraph_mode": "FULL", "mode": 3},
    "cpu_offload_gb": 2,
    "cudagraph_capture_sizes": [1, 2, 4],
    "device_ids": [0, "1"],
    "enable_ep_weight_filter": True,
    "enforce_eager": False,
    "hf_overrides": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "ignore_patterns": ["*.pth"],
    "load_format": "runai_streamer",
    "max_cpu_loras": None,
    "optimization_level": 2,
}


@pytest.mark.parametrize("name", GOOD)
def test_an_argument_of_vllm_is_kept_as_it_is(name: str) -> None:
    deployment = load_args(f"{name}: {json.dumps(GOOD[name])}")
    assert deployment.pools[0].engine.args == {name: GOOD[name]}
    assert loads(dump(deployment), "dump") == deployment


def test_arguments_come_from_the_command_line_too() -> None:
    deployment = loads("", "(default)", ["pools.decode.engine.args.attention_backend=FLASHINFER"])
    assert [pool.engine.args for pool in deployment.pools] == [{}, {"attention_backend": "FLASHINFER"}]


# (args, field below args, part of found, part of expected)
BAD = {
    "a typing error": ("atention_backend: FLASHINFER", "atention_backend", "unknown", "'attention_backend'"),
    "part of a name": ("placement: 1", "placement", "unknown", "'expert_placement_strategy'"),
    "a name like no other": ("zzz: 1", "zzz", "unknown field", "names, as in docs"),
    "text for a number": ("max_num_active_seqs: '8'", "max_num_active_seqs", '"8" (text)', "a whole number"),
    "a number for a boolean": ("enforce_eager: 1", "enforce_eager", "1", "true or false"),
    "an unknown choice": ("attention_backend: FLASH", "attention_backend", '"FLASH"', "FLASH_ATTN"),
    "an unknown level": ("optimization_level: 9", "optimization_level", "9", "one of: 0, 1, 2, 3"),
    "text for a mapping": ("compilation_config: FULL", "compilation_config", '"FULL"', "a mapping of fields"),
    "none of two types": ("ignore_patterns: 1", "ignore_patterns", "1", "a list or text"),
    "an item of a list": ("cudagraph_capture_sizes: [1, x]", "cudagraph_capture_sizes[1]", '"x"', "a whole"),
    "null where vLLM has none": ("enforce_eager: null", "enforce_eager", "null", "true or false"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_vllm_would_not_take_is_reported_with_its_field(case: str) -> None:
    text, field, found, expected = BAD[case]
    (problem,) = problems(text)
    assert problem.field == f"pools[0].engine.args.{field}"
    assert problem.line == 8
    assert found in problem.found
    assert expected in problem.expected


def test_what_other_fields_set_is_refused_with_those_fields() -> None:
    found = problems("\n".join(f"{name}: 1" for name in OWNED))
    assert [problem.field for problem in found] == [f"pools[0].engine.args.{name}" for name in OWNED]
    for problem, remedy in zip(found, OWNED.values(), strict=True):
        assert problem.expected.endswith(remedy)


def fields_of(name: str) -> bool:
    """Whether the spec or the chart has the dotted field."""
    node: dict[str, Any] = schema()
    root = node
    for part in name.split("."):
        while "$ref" in node or "items" in node:
            node = root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node["items"]
        node = next((each for each in node.get("anyOf", []) if each.get("type") != "null"), node)
        while "$ref" in node:
            node = root["$defs"][node["$ref"].rpartition("/")[2]]
        if part not in node.get("properties", {}):
            return False
        node = node["properties"][part]
    return True


def test_remedies_name_fields_that_there_are() -> None:
    for remedy in OWNED.values():
        for word in remedy.split(":")[0].replace(",", "").split():
            if "." in word and not word.startswith(("modelCache", "tokenizer")):
                assert fields_of(word) or fields_of(f"pools.{word}"), word


def test_tables_name_arguments_of_vllm() -> None:
    assert set(OWNED) | set(KV_LAYOUT) <= set(VllmArgs.__annotations__)
    assert not set(OWNED) & set(KV_LAYOUT)


def test_pools_that_exchange_kv_agree_on_what_a_block_holds() -> None:
    option = "pools.decode.engine.args.hf_overrides={head_dim: 64}"
    with pytest.raises(SpecError, match=r"engine\.args\.hf_overrides changes what a KV block holds"):
        loads("", "(default)", [option])
    loads("", "(default)", [option, option.replace("decode", "prefill")])


def test_editors_know_the_arguments() -> None:
    validator = jsonschema.Draft202012Validator(schema())

    def valid(args: dict[str, Any]) -> bool:
        pool = {"name": "a", "role": "both", "engine": {"args": args}}
        return bool(validator.is_valid({"disaggregation": "never", "pools": [pool]}))

    assert valid(GOOD)
    assert not valid({"attention_backend": "FLASH"})
    assert not valid({"atention_backend": "FLASH_ATTN"})
    assert not valid({"model": "a"})
