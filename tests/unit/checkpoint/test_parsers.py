"""Parsers that a model's files call for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.checkpoint import parsers
from kvasir.checkpoint.parsers import reasoning_parser, tool_parser
from kvasir.config.checks.parsers import REASONING_PARSERS, TOOL_PARSERS
from kvasir.config.load.loader import load
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_parsers import with_parsers
from kvasir.core.errors import ConfigError

QWEN3 = (
    'return a json object within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args>}'
    "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
)
CODER = "<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n</function>\n</tool_call>"
LLAMA3 = 'Environment: ipython {"name": function name, "parameters": dictionary}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{}\n```"
DEEPSEEK_31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{}"
MARKS = "<tool_call> <|python_tag|> [TOOL_CALLS] <|channel|> <|call|>"
TOKENS = " ".join((*parsers._DEEPSEEK, *parsers._THINKS, MARKS))


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen3", QWEN3, "hermes", "qwen3"),
        ("qwen2", QWEN3, "hermes", None),
        ("qwen3", QWEN3.replace("enable_thinking", "x"), "hermes", None),
        ("qwen3_moe", "{{ '<|im_start|>assistant\\n<think>\\n' }}", None, "qwen3"),
        ("qwen3_moe", CODER, "qwen3_xml", None),
        ("llama", LLAMA3, "llama3_json", None),
        ("llama", LLAMA3.replace('"', '\\"'), "llama3_json", None),
        ("mistral", "[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
        ("deepseek_v3", DEEPSEEK + "<｜Assistant｜><think>\n", "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3", DEEPSEEK_31, "deepseek_v31", None),
        ("gpt_oss", "<|channel|>", "openai", "openai_gptoss"),
        ("llama", "{{ messages }}", None, None),
        ("glm4_moe", '<tool_call><arg_key>k</arg_key></tool_call> "arguments"', None, None),
        ("llama", "", None, None),
    ],
)
def test_the_template_decides(
    model_type: str, template: str, tools: str | None, reasoning: str | None
) -> None:
    assert tool_parser(model_type, template, TOKENS) == tools
    assert reasoning_parser(model_type, template, TOKENS) == reasoning


def test_a_parser_is_not_chosen_without_the_tokens_that_it_looks_for() -> None:
    assert tool_parser("qwen3", CODER, "") is None
    assert reasoning_parser("qwen3", QWEN3, "<tool_call>") is None


def test_a_model_of_harmony_s_type_gets_no_other_parser() -> None:
    """Without Harmony's tokens it gets none, and forced calls are JSON; vLLM refuses the others."""
    assert tool_parser("gpt_oss", QWEN3, TOKENS.replace("<|call|>", "")) is None
    assert reasoning_parser("gpt_oss", QWEN3, TOKENS.replace("<|call|>", "")) is None
    assert tool_parser("gpt_oss", QWEN3, TOKENS) == "openai"


def test_every_choice_is_a_parser_of_the_engine() -> None:
    assert {rule.parser for rule in parsers._TOOLS} <= set(TOOL_PARSERS)
    assert {rule.parser for rule in parsers._REASONING} <= set(REASONING_PARSERS)


def folder(path: Path, template: str) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (path / "tokenizer.json").write_text(TOKENS)
    (path / "chat_template.jinja").write_text(template)
    return path


def test_auto_becomes_a_name_and_names_are_kept(tmp_path: Path) -> None:
    options = ["pools.decode.engine.tool_parser=auto", "pools.decode.engine.reasoning_parser=deepseek_r1"]
    view = with_parsers(load(None, options), folder(tmp_path, QWEN3))
    engine = view.pool("decode").engine
    assert (engine.tool_parser, engine.reasoning_parser) == ("hermes", "deepseek_r1")
    configured = [*options, f"model.chat_template='{CODER} {{{{ messages }}}}'"]
    assert with_parsers(load(None, configured), tmp_path).pool("decode").engine.tool_parser == "qwen3_xml"


def test_auto_is_refused_where_nothing_is_certain(tmp_path: Path) -> None:
    spec = load(None, ["pools.decode.engine.tool_parser=auto"])
    with pytest.raises(ConfigError, match=r"^engine\.tool_parser: auto, and .* set the name of one"):
        with_parsers(spec, folder(tmp_path, "{{ messages }}"))


def test_by_default_tool_calls_are_parsed_where_a_parser_is_certain(tmp_path: Path) -> None:
    view = with_parsers(load(None), folder(tmp_path, QWEN3))
    assert {pool.engine.tool_parser for pool in view.pools} == {"hermes"}
    assert {pool.engine.reasoning_parser for pool in view.pools} == {None}
    spec = load(None)
    assert with_parsers(spec, folder(tmp_path, "{{ messages }}")) is spec


def test_the_model_that_ships_with_kvasir_takes_tools() -> None:
    view = with_parsers(load(None), resolve_model("kvasir-tiny"))
    assert {pool.engine.tool_parser for pool in view.pools} == {"hermes"}


def test_no_parser_is_chosen_where_the_spec_wants_none_or_names_one(tmp_path: Path) -> None:
    for name, resolved in (("none", None), ("hermes", "hermes")):
        spec = load(None, [f"pools.{pool}.engine.tool_parser={name}" for pool in ("prefill", "decode")])
        view = with_parsers(spec, tmp_path / "absent")
        assert {pool.engine.tool_parser for pool in view.pools} == {resolved}
