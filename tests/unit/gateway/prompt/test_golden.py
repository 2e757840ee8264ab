"""The edge's golden prompts follow its template and tokenizer, and vLLM computes the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir.core.golden import GOLDEN_CASES, GoldenPrompt, golden_conflicts
from kvasir.native import chain_hashes, root_hash
from kvasir_platform.gateway.prompt.golden import edge_golden
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer

DATED = (
    "{{ bos_token }}{{ strftime_now('%d %B %Y') }}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TWO = [
    {"name": "default", "template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"},
    {"name": "tool_use", "template": "{{ tools | tojson(indent=1) }}{{ messages[-1].content }}"},
]

Folder = Callable[..., Path]

NO_MAP = {"added_tokens_decoder": {"0": {"content": "<|bos|>", "special": True}}}
"""With it special_tokens_map.json is not looked at."""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A copy of the shipped model without its weights, with other entries in tokenizer_config.json."""

    def make(**config: Any) -> Path:
        made = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(resolve_model("kvasir-tiny"), made, ignore=shutil.ignore_patterns("*.safetensors"))
        path = made / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return made

    return make


def edge(folder: Path, template: str | None = None) -> tuple[GoldenPrompt, ...]:
    return edge_golden("kvasir-tiny", ModelTokenizer.from_folder(folder, template=template))


def names(golden: tuple[GoldenPrompt, ...]) -> set[str]:
    return {prompt.name for prompt in golden}


def test_the_shipped_model_makes_every_golden_prompt(folder: Folder) -> None:
    golden = edge(folder())
    assert names(golden) == {case.name for case in GOLDEN_CASES}
    by_name = {prompt.name: prompt for prompt in golden}
    assert '"name": "get_weather"' in by_name["chat_tools"].text
    tokens = ModelTokenizer.from_folder(folder()).encode(["Call me Ishmael."], add_special_tokens=True)[0]
    chain = chain_hashes(tokens, 1, root_hash("kvasir-tiny", "s", "golden-adapter"))[-1]
    assert by_name["completion_salted_lora"] == GoldenPrompt(
        "completion_salted_lora", "Call me Ishmael.", len(tokens), chain
    )


def test_a_template_that_refuses_a_system_turn_leaves_those_chats_out(folder: Folder) -> None:
    made = names(edge(folder(chat_template=NO_SYSTEM)))
    assert "chat" in made
    assert made.isdisjoint({"chat_turns", "chat_code", "chat_tools"})


def test_without_a_template_completions_are_left(folder: Folder) -> None:
    assert names(edge(folder(chat_template=None))) == {
        case.name for case in GOLDEN_CASES if not case.messages
    }


def test_a_template_that_writes_the_date_gives_the_same_on_every_day(folder: Folder) -> None:
    golden = edge(folder(chat_template=DATED))
    assert "29 February 2024" in golden[0].text


def test_a_template_of_its_own_for_tools_is_taken_for_chats_with_tools(folder: Folder) -> None:
    by_name = {prompt.name: prompt for prompt in edge(folder(chat_template=TWO))}
    assert by_name["chat"].text.startswith("[user]What")
    assert by_name["chat_tools"].text.startswith('[\n {\n  "type": "function"')


def test_another_special_token_changes_chats_though_the_digest_does_not_see_it(folder: Folder) -> None:
    (first, *_) = golden_conflicts(edge(folder(bos_token="<|eos|>", **NO_MAP)), edge(folder()))
    assert first.startswith("golden.chat: text from character 2 on: '<|eos|><|user|>What is the'…")
    assert " != '<|bos|><|user|>What is the'… (router)" in first


def test_special_tokens_map_overrules_the_config_unless_added_tokens_are_listed_there(folder: Folder) -> None:
    def begins(**config: Any) -> str:
        return edge(folder(bos_token="<|eos|>", **config))[0].text[:7]

    assert begins() == "<|bos|>"
    assert begins(**NO_MAP) == "<|eos|>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<|eos|>"},
        {"bos_token": "<|eos|>", **NO_MAP},
        {"chat_template": DATED},
        {"chat_template": NO_SYSTEM},
        {"chat_template": TWO},
        {"chat_template": None},
    ],
    ids=["shipped", "bos-overruled", "bos", "dated", "no-system", "two-templates", "none"],
)
def test_vllm_renders_tokenizes_and_names_the_golden_prompts_alike(
    folder: Folder, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the template of the folder, and with one that the spec sets."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    from kvasir_workers.engines.vllm.setup.golden import engine_golden

    made = folder(**config)
    # Shorter than the longest golden prompt, which is never run.
    engine = AsyncEngineArgs(model=str(made), max_model_len=128).create_engine_config()
    renderer = renderer_from_config(engine)
    try:
        theirs = engine_golden("kvasir-tiny", renderer)
        configured = engine_golden("kvasir-tiny", renderer, DATED)
    finally:
        renderer.shutdown()
    assert golden_conflicts(theirs, edge(made)) == []
    assert names(theirs) == names(edge(made))
    assert golden_conflicts(configured, edge(made, DATED)) == []
    assert names(configured) == names(edge(made, DATED))
