"""Golden prompts, for which router and worker must produce the same text, tokens and block names.

The router tokenizes and the worker computes, so a template, special token or tokenizer setting that differs
between them causes no error, but worse answers and cold caches. Each side therefore processes these prompts
at start, and the router refuses a worker whose results differ, with the first difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, takewhile
from typing import Any, TypeAlias

MAX_TEXT_BYTES = 4096
"""UTF-8 bytes of a prompt's text kept to show differences; tokens and chain cover the whole text."""
_SHOWN = 3
_EXCERPT_BEFORE, _EXCERPT_AFTER = 24, 24

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Tool] | None], str | None]
"""Returns the prompt of a chat up to the start of the assistant's turn, or None if there is no template or it
rejects the chat. Templates that need the date must get `golden_date`."""
Encode: TypeAlias = "Callable[[str, bool], array[int]]"
"""Returns the token ids of a text; the flag says whether to add special tokens."""
Chain: TypeAlias = "Callable[[array[int], str, str], int]"
"""Returns the block name of the last token if each token is a block, for a salt and an adapter."""


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """One prompt on which router and worker must agree: the rendered text (its first MAX_TEXT_BYTES), the
    number of tokens, and the name of the last block if each token is a block."""

    name: str
    text: str
    tokens: int
    chain: int


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """The source of a golden prompt: a chat, or the text of a completion if `messages` is empty."""

    name: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str = ""
    salt: str = ""
    adapter: str = ""


def golden_date(form: str) -> str:
    """A fixed `strftime_now` for templates, because router and worker can start on different days."""
    return datetime(2024, 2, 29, 13, 5, 9).strftime(form)


def golden_prompts(render: Render, encode: Encode, chain: Chain) -> tuple[GoldenPrompt, ...]:
    """Return the golden prompts that this side supports. Chats need a template that accepts them, tools one
    that renders them."""
    made = []
    for case in GOLDEN_CASES:
        text = _text(case, render)
        if text is None:
            continue
        tokens = encode(text, not case.messages)
        if tokens:
            named = chain(tokens, case.salt, case.adapter)
            made.append(GoldenPrompt(case.name, _cut(text), len(tokens), named))
    return tuple(made)


def golden_conflicts(candidate: Sequence[GoldenPrompt], expected: Sequence[GoldenPrompt]) -> list[str]:
    """Return the differences between the golden prompts of a worker and of the router, each as `golden.NAME:
    worker's != router's`; an empty list if either side has none. After the first few, differences are only
    counted."""
    if not candidate or not expected:
        return []
    theirs = {each.name: each for each in candidate}
    ours = {each.name: each for each in expected}
    names = [*ours, *(name for name in theirs if name not in ours)]
    found = [
        f"golden.{name:.40}: {_difference(theirs.get(name), ours.get(name))}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    if len(found) > _SHOWN:
        found[_SHOWN:] = [f"golden: {len(found) - _SHOWN} more of {len(names)} prompts differ"]
    return found


def _text(case: GoldenCase, render: Render) -> str | None:
    if not case.messages:
        return case.text
    if not case.tools:
        return render(case.messages, None)
    text = render(case.messages, case.tools)
    return None if text == render(case.messages, None) else text


def _cut(text: str) -> str:
    return text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def _difference(theirs: GoldenPrompt | None, ours: GoldenPrompt | None) -> str:
    if theirs is None or ours is None:
        return f"{_size(theirs)} != {_size(ours)} (router)"
    parts = []
    if theirs.text != ours.text:
        pairs = zip(theirs.text, ours.text, strict=False)
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        parts.append(
            f"text from character {at} on: {_excerpt(theirs.text, at)} != {_excerpt(ours.text, at)} (router)"
        )
    if theirs.tokens != ours.tokens:
        parts.append(f"tokens: {theirs.tokens} != {ours.tokens} (router)")
    if theirs.chain != ours.chain:
        parts.append(f"chain: {theirs.chain:016x} != {ours.chain:016x} (router)")
    if theirs.text == ours.text:
        parts.append(f"of equal text {_excerpt(ours.text, 0)}")
    return ", ".join(parts)


def _size(prompt: GoldenPrompt | None) -> str:
    return "not made" if prompt is None else f"{prompt.tokens} tokens {_excerpt(prompt.text, 0)}"


def _excerpt(text: str, at: int) -> str:
    """Return a few characters around `at`, with unprintable ones escaped."""
    start = max(0, at - _EXCERPT_BEFORE)
    shown = "".join(islice(text, start, at + _EXCERPT_AFTER))
    before = "…" if start else ""
    after = "…" if at + _EXCERPT_AFTER < len(text) else ""
    return f"{before}{shown!a}{after}"


def _turns(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    """Alternating user and assistant messages, which every template accepts."""
    first = () if system is None else ({"role": "system", "content": system},)
    roles = ("user", "assistant")
    return (*first, *({"role": roles[i % 2], "content": content} for i, content in enumerate(contents)))


_WEATHER: Tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place & time; °C unless asked otherwise.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": 'A town, as in "Tromsø"'},
                "hours": {"type": "integer", "minimum": 0, "maximum": 240},
                "units": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["place"],
        },
    },
}
_SEARCH: Tool = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search documents.\nReturns <titles> only.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
_CODE = """Why does this fail?

```python
def mean(xs: list[float]) -> float:
\treturn sum(xs) / len(xs)  # {{ not a template }} {% nor this %}

print(f"{mean([]):>8.2f}", r"\\d+\\s*", 0x1F, 1_000_000 ** -2)
```
"""

GOLDEN_CASES: tuple[GoldenCase, ...] = (
    GoldenCase("chat", _turns("What is the capital of Iceland?")),
    GoldenCase(
        "chat_turns",
        _turns(
            "Name three rivers.",
            "Rhine, Nile, and Amazon.",
            "Which of them is the longest?",
            "By most measures, the Nile: 6,650 km.",
            "And the shortest?",
            system="You are brief. Answer in one sentence.",
        ),
    ),
    GoldenCase(
        "chat_unicode",
        _turns(
            "Grüße, 世界! Привет, мир; שלום; नमस्ते \U0001f469\u200d\U0001f469\u200d\U0001f467 🇳🇴 "
            "e\u0301 \u00e9 \ufb01 \u00a0\u200b½ — “quoted” ‘so’…"
        ),
    ),
    GoldenCase(
        "chat_whitespace", _turns("  two before,\ttab\r\nline\n\n\n   three\u2003em space, one after ")
    ),
    GoldenCase("chat_code", _turns(_CODE, system="You review code.")),
    GoldenCase(
        "chat_tools",
        _turns("Will it rain in Tromsø tomorrow?", system="Use tools when they help."),
        tools=(_WEATHER, _SEARCH),
    ),
    GoldenCase("chat_salted", _turns("What is the capital of Iceland?"), salt="tenant-a/ß"),
    GoldenCase("chat_lora", _turns("What is the capital of Iceland?"), adapter="golden-adapter"),
    GoldenCase("completion", text="It was the best of times, it was the worst of times,"),
    GoldenCase("completion_unicode", text=" 1234567890 3.14159 naïve café 你好 🙂🙂\n\n\tEnd "),
    GoldenCase("completion_salted_lora", text="Call me Ishmael.", salt="s", adapter="golden-adapter"),
)
