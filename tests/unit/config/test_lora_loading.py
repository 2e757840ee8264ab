"""The spec of adapters that are loaded at run time."""

from __future__ import annotations

import pytest

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import loads

ON = "lora_loading: {allow: [/adapters]}\n"
SEVERAL = """
lora_loading: {allow: [/adapters], max_rank: 64}
models: [{name: second, source: kvasir-tiny}]
pools:
  - {name: prefill, role: prefill}
  - {name: decode, role: decode}
  - {name: prefill-2, role: prefill, model: second}
  - {name: decode-2, role: decode, model: second}
"""


def test_nothing_can_be_loaded_unless_a_source_is_allowed() -> None:
    assert not loads("{}", "t.yaml").lora_loading.enabled
    assert loads(ON, "t.yaml").lora_loading.enabled


def test_each_model_has_an_allow_list_of_its_own() -> None:
    first, second = loads(SEVERAL, "t.yaml").views()
    assert (first.lora_loading.allow, second.lora_loading.allow) == (("/adapters",), ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lora_loading: {allow: [adapters]}", "an absolute folder"),
        ("lora_loading: {allow: [/a/../b]}", "has a part"),
        ("lora_loading: {allow: [/a], max_adapters: 0}", "1"),
        ("lora_loading: {allow: [/a], max_rank: 1000}", "512"),
        (
            ON + "disaggregation: never\npools: [{name: v, role: embed}]",
            "only adapters of models that generate",
        ),
        (
            "lora_loading: {allow: [/a, org/]}\ndisaggregation: never\n"
            "pools: [{name: serve, role: both, engine: {nodes: 2, tensor_parallel_size: 2}}]",
            "folders that all nodes share, not org/",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        loads(text, "t.yaml")
    assert said in caught.value.message
