"""The edge renders a chat exactly as vLLM's own server does, from the same body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.models.tiny_tokens import VOCABULARY

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.openai.calls import chat_call
from kvasir_platform.gateway.openai.schema.decode import decode_chat
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate, special_tokens

pytestmark = pytest.mark.slow

TEMPLATES = {
    "shipped": "",
    "parts": (
        "{% for m in messages %}[{{ m.role }}"
        "{% if m.content is string %}{% if m.content %}<{{ m.content }}>{% endif %}"
        "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}]{% endfor %}"
    ),
    "parts only": (
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}"
        "{% for p in m.content %}<{{ p.text }}>{% endfor %}]{% endfor %}"
    ),
    "text": (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.name }}|{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} "
        "{{ c.function.arguments | tojson }}){% endfor %}]{% endfor %}"
        "{% for d in documents or [] %}{{ d.title }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}{{ reasoning_effort }}{{ flavour }}"
    ),
}
FUNCTION = {"name": "search", "description": "ä <b> & c", "parameters": {"type": "object", "x": [1.5, None]}}
TOOL = {"type": "function", "function": FUNCTION}
BARE = {"type": "function", "function": {"name": "bare", "strict": True}}
ASKS = {"role": "user", "content": "x?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "ü", "n": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "search", "arguments": "not JSON"}},
        {"id": "c3", "type": "function", "function": {"name": "bare", "arguments": ""}},
    ],
}
FOUND = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}] * 2}

BODIES: dict[str, dict[str, Any]] = {
    "tools": {"messages": [ASKS], "tools": [TOOL, BARE]},
    "named": {
        "messages": [ASKS],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
    },
    "not called": {"messages": [ASKS], "tools": [TOOL], "tool_choice": "none"},
    "tool turns": {"messages": [ASKS, CALLS, FOUND, ASKS], "tools": [TOOL, BARE]},
    "named turns": {
        "messages": [{**ASKS, "name": "ann"}, {"role": "assistant", "content": "y", "name": "bob"}, ASKS]
    },
    "reasoning": {"messages": [ASKS, {"role": "assistant", "content": "y", "reasoning": "hm"}, ASKS]},
    "reasoning content": {
        "messages": [ASKS, {"role": "assistant", "content": "y", "reasoning_content": "hm"}, ASKS]
    },
    "developer": {
        "messages": [
            {"role": "developer", "content": "d"},
            ASKS,
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
        ]
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]},
    "no turn": {"messages": [ASKS], "add_generation_prompt": False},
    "continued": {
        "messages": [ASKS, {"role": "assistant", "content": "It is "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "documents": {"messages": [ASKS], "documents": [{"title": "t", "text": "d"}]},
    "effort": {"messages": [ASKS], "reasoning_effort": "low"},
    "no effort": {"messages": [ASKS], "reasoning_effort": "none", "chat_template_kwargs": {"flavour": "x"}},
    "own thinking": {
        "messages": [ASKS],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


UNLIKE = {
    # vLLM cannot read this template's tree, and joins parts by lines where transformers does not.
    ("parts", "shipped"),
    # vLLM makes one string of what developers and the system say, whose letters are then taken for parts.
    ("developer", "parts"),
    ("developer", "parts only"),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("kvasir-tiny")


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_edge_renders_chats_as_vllms_server_does(folder: Path, template: str) -> None:
    from transformers import AutoTokenizer
    from vllm.config import ModelConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    config = ModelConfig(model=str(folder), tokenizer=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = TEMPLATES[template] or str(tokenizer.chat_template)
    ours = ChatTemplate(source, special_tokens(folder))
    capabilities = ModelCapabilities(tools=True, reasoning=True)
    compared = 0
    for name, body in BODIES.items():
        if body.get("documents") and not ours.takes_documents:
            continue
        if (name, template) in UNLIKE:
            continue
        request = ChatCompletionRequest(model="m", **json.loads(json.dumps(body)))
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        form = resolve_chat_template_content_format(source, tools, "auto", tokenizer, model_config=config)
        conversation, _, _ = parse_chat_messages(request.messages, config, form)
        kwargs = request.build_chat_params(source, "auto").get_apply_chat_template_kwargs()
        theirs = safe_apply_chat_template(
            config, tokenizer, conversation, tools=tools, tokenize=False, **kwargs
        )
        whole = {"model": "m", **body}
        (prompt,) = chat_call(decode_chat(json.dumps(whole).encode()), ours, VOCABULARY, capabilities).prompts
        assert (name, prompt) == (name, theirs)
        compared += 1
    assert compared >= len(BODIES) - 2
