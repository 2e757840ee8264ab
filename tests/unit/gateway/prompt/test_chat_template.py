"""Prompts are rendered as in transformers, and errors of a template are the client's."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from kvasir.config.load.model_files import chat_template, resolve_model
from kvasir.core.errors import ConfigError, RequestError
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate, special_tokens
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaces \n\n kept? "}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three {{ 1 + 1 }} {% raw %} <|end|> é 🙂"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
]

ODD_TEMPLATES = [
    "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m.content }}\n{% endfor %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{%- for m in messages %}{% generation %}[{{ m.role }}]{% endgeneration %}{% break %}{% endfor %}",
    "{{ bos_token }}{{ messages[0]['content'] | upper }}{{ tools is none }}{{ documents is none }}",
    "{%- if add_generation_prompt %}{{ 'go' }}{%- endif %}{{ flavour | default('plain') }}",
]


@pytest.mark.slow
@pytest.mark.parametrize("chat", CHATS)
def test_kvasir_tiny_renders_and_tokenizes_as_in_transformers(chat: list[dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    folder = resolve_model("kvasir-tiny")
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ModelTokenizer.from_folder(folder)
    assert ours.template is not None
    prompt = ours.template.render(chat, {})
    assert prompt == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = ours.encode([prompt], add_special_tokens=False)[0]
    shown = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert list(ids) == shown
    plain = ours.encode(["Once upon a time", ""], add_special_tokens=True)
    assert [list(p) for p in plain] == theirs(["Once upon a time", ""])["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("source", ODD_TEMPLATES)
@pytest.mark.parametrize("chat", CHATS[:3])
def test_odd_templates_render_as_in_transformers(source: str, chat: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=True, bos_token="<s>", flavour="x"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(chat, {"flavour": "x"}) == rendered[0][0]


QWEN_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<doc>' + document.title + ': ' + document.text + '</doc>' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TRIMS = (
    "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "ä <b>", "parameters": {"x": [1, None]}}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "x?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"ü": 1, "b": [2.5]}}}
        ],
    },
    {"role": "tool", "content": "found", "tool_call_id": "c"},
    {"role": "assistant", "content": "It is so "},
]


@pytest.mark.slow
@pytest.mark.parametrize("source", [QWEN_LIKE, TRIMS])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "documents": [{"title": "t", "text": "d"}]},
    ],
)
def test_tools_documents_and_continued_messages_render_as_in_transformers(
    source: str, tools: Any, options: dict[str, Any]
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([TOOL_CHAT], chat_template=source, tools=tools, **options)
    assert ChatTemplate(source, {}).render(TOOL_CHAT, {}, tools, **options) == rendered[0][0]


def test_a_message_goes_on_where_its_text_ends() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c "}]
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    assert template.render(chat, {}, add_generation_prompt=False, continue_final_message=True) == "[a][b c "
    trims = ChatTemplate(TRIMS, {})
    assert trims.render(chat, {}, add_generation_prompt=False, continue_final_message=True) == "[a][b c"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(parts, {}, continue_final_message=True) == "[a\nb"


@pytest.mark.parametrize(
    ("source", "content"),
    [("{{ messages[0].role }}", "x"), ("{% for m in messages %}{{ m.content[1:] }}{% endfor %}", "xyz")],
)
def test_a_message_that_the_template_changes_cannot_go_on(source: str, content: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render(
            [{"role": "assistant", "content": content}], {}, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"


def test_developers_speak_as_the_system_where_the_template_knows_no_developers() -> None:
    source = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
    ]
    assert ChatTemplate(source, {}).render(chat, {}) == "[system:s\n\nd][user:u]"
    assert ChatTemplate(source, {}).render(chat[2:] + chat[1:2], {}) == "[system:d][user:u]"
    knows = ChatTemplate(source + "{# 'developer' #}", {})
    assert knows.render(chat, {}) == "[system:s][user:u][developer:d]"


def test_a_clients_template_has_the_models_special_tokens() -> None:
    template = ChatTemplate("x", {"bos_token": "<s>"})
    theirs = template.of_client("{{ bos_token }}{{ messages[0].content }}")
    assert theirs.render([{"role": "user", "content": "a"}], {}) == "<s>a"
    assert template.of_client("{{ bos_token }}{{ messages[0].content }}") is theirs


def test_the_shipped_model_has_its_template_and_special_tokens() -> None:
    folder = resolve_model("kvasir-tiny")
    template = ChatTemplate(chat_template(folder), special_tokens(folder))
    prompt = template.render([{"role": "user", "content": "hi"}], {})
    assert prompt == "<|bos|><|user|>hi<|end|><|assistant|>"


def test_parts_are_joined_for_a_template_that_knows_only_text() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    flat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert flat.render(chat, {}) == "a\nb"
    parted = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", {}
    )
    assert parted.render(chat, {}) == "<a><b>"
    assert parted.render([{"role": "user", "content": "a"}], {}) == "<a>"


def test_a_template_that_refuses_gives_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render([], {})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render([], {})


def test_the_clock_of_a_template_is_the_one_given() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {}, now=lambda: datetime(1971, 1, 1))
    assert template.render([], {}) == "1971"


def test_a_broken_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})
