"""The engine's parsers of tool calls and reasoning for a model, where its files leave no doubt.

A model writes tool calls in the form that its chat template shows it, so the marks in the template decide,
and not the model's name: fine-tunes change the one and keep the other. A parser that also needs the marks as
tokens is chosen only if the tokenizer has them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Rule:
    """A parser for models of these types, () for any, whose template has all `marks`, none of `without`, and
    whose tokenizer has `tokens`. `alone`: vLLM takes no other parser for these types."""

    parser: str
    types: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    alone: bool = False


_HARMONY = ("<|channel|>", "<|call|>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

_TOOLS = (
    _Rule("openai", types=("gpt_oss",), tokens=_HARMONY, alone=True),
    _Rule("seed_oss", types=("seed_oss",), marks=("<seed:tool_call>",)),
    _Rule("minimax_m2", types=("minimax_m2", "minimax"), marks=("<minimax:tool_call>", "<invoke")),
    _Rule("kimi_k2", types=("kimi_k2",), marks=("<|tool_calls_section_begin|>",)),
    _Rule("deepseek_v3", marks=(_DEEPSEEK[0], "```json"), tokens=_DEEPSEEK),
    _Rule("deepseek_v31", marks=(_DEEPSEEK[0], "<｜tool▁sep｜>"), without=("```",), tokens=_DEEPSEEK),
    _Rule("mistral", types=("mistral", "mixtral"), marks=("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    _Rule("llama3_json", types=("llama",), marks=("ipython", '"parameters"'), tokens=("<|python_tag|>",)),
    _Rule("qwen3_xml", marks=("<tool_call>", "<function=", "<parameter="), tokens=("<tool_call>",)),
    _Rule(
        "hermes",
        marks=("<tool_call>", "</tool_call>", '"arguments"'),
        without=("<function=", "<arg_key>"),
    ),
)  # fmt: skip

_THINKS = ("<think>", "</think>")

_REASONING = (
    _Rule("openai_gptoss", types=("gpt_oss",), tokens=_HARMONY, alone=True),
    _Rule("seed_oss", types=("seed_oss",), marks=("<seed:think>",)),
    _Rule("minimax_m2", types=("minimax_m2", "minimax"), marks=("<think>", "<minimax:tool_call>")),
    _Rule("deepseek_r1", marks=("<｜Assistant｜><think>",), without=("enable_thinking",), tokens=_THINKS),
    _Rule("qwen3", types=("qwen3", "qwen3_moe"), marks=("enable_thinking", *_THINKS), tokens=_THINKS),
    _Rule("qwen3", types=("qwen3", "qwen3_moe"), marks=("assistant\\n<think>",), tokens=_THINKS),
)


def tool_parser(model_type: str, template: str, tokenizer: str) -> str | None:
    """Return the parser of tool calls for a model of that type and chat template, None if none is certain.
    `tokenizer` is the text of tokenizer.json."""
    return _chosen(_TOOLS, model_type, template, tokenizer)


def reasoning_parser(model_type: str, template: str, tokenizer: str) -> str | None:
    """Return the parser of reasoning, as `tool_parser` does that of tool calls."""
    return _chosen(_REASONING, model_type, template, tokenizer)


def _chosen(rules: tuple[_Rule, ...], model_type: str, template: str, tokenizer: str) -> str | None:
    # Templates inside JSON strings or Jinja literals may escape quotes.
    shown = template.replace('\\"', '"')
    for rule in rules:
        if (
            (not rule.types or model_type in rule.types)
            and all(mark in shown for mark in rule.marks)
            and not any(mark in shown for mark in rule.without)
            and all(token in tokenizer for token in rule.tokens)
        ):
            return rule.parser
        if rule.alone and model_type in rule.types:
            return None
    return None
