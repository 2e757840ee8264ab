"""Prompts are rendered as transformers renders them, and a template's refusals are the client's."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from kvasir.config.model_files import chat_template, resolve_model
from kvasir.core.errors import ConfigError, RequestError
from kvasir_platform.gateway.chat_template import ChatTemplate, special_tokens
from kvasir_platform.gateway.tokenization import ModelTokenizer

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
