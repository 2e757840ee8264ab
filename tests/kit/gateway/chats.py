"""Chats with a model that has parsers, each whole and streamed with equal results; and such a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

MODEL = "kvasir-tiny"
USER: Any = [{"role": "user", "content": "Hello"}]
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}
"""Disables reasoning."""


def chat(client: openai.OpenAI, *, extra: dict[str, Any] = AT_ONCE, **fields: Any) -> Any:
    """Return the first choice of a whole chat, after checking that the same chat streamed is equal."""
    asked = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 300, **fields}
    answer = client.chat.completions.create(**asked, extra_body=extra)
    tools = asked.get("tools", openai.omit)
    state: Any = ChatCompletionStreamState(input_tools=tools)
    reasoning = ""
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        **asked, extra_body=extra, stream=True, stream_options=options
    ):
        state.handle_chunk(chunk)
        reasoning += "".join(
            getattr(choice.delta, "reasoning_content", None) or "" for choice in chunk.choices
        )
    streamed = state.current_completion_snapshot
    one, other = answer.choices[0], streamed.choices[0]
    assert (one.message.content or "") == (other.message.content or "")
    assert (getattr(one.message, "reasoning_content", None) or "") == reasoning
    assert one.finish_reason == other.finish_reason
    assert called(one) == called(other)
    assert streamed.usage.completion_tokens == answer.usage.completion_tokens
    assert streamed.usage.completion_tokens_details == answer.usage.completion_tokens_details
    return one


def called(choice: Any) -> list[tuple[str, str]]:
    """Names and arguments of a choice's calls."""
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def thinking_model(source: Path, folder: Path) -> Path:
    """Copy `source`, which is kvasir-tiny, to `folder` with names for two of its tokens that mark the start
    and end of reasoning for vLLM. As in models that reason, they are added tokens and not special ones."""
    shutil.copytree(source, folder)
    names = {"<|system|>": "<think>", "<|tool|>": "</think>"}
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    text = tokenizer.read_text()
    for old, new in names.items():
        text = text.replace(old, new)
    rules = json.loads(text)
    for token in rules["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in names.values()
    tokenizer.write_text(json.dumps(rules))
    content = json.loads(config.read_text())
    content["extra_special_tokens"] = [each for each in content["extra_special_tokens"] if each not in names]
    config.write_text(json.dumps(content))
    return folder
