"""Scripted output of the simulated model, and its parsing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import OutputParsing, token_ids
from kvasir_workers.engines.parts import StepParts
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.speech import Speech, SpeechParser

MODEL = SimModel()
TOOLS = json.dumps([{"type": "function", "function": {"name": name}} for name in ("sea", "hill")])
THINKING = json.dumps({"enable_thinking": True})
PROMPT = token_ids([1, 2, 3])


def said(parsing: OutputParsing, length: int = 40) -> list[tuple[int, str]]:
    """Tokens up to the end, and how they read."""
    speech = Speech(MODEL, parsing, PROMPT, ends=True)
    output = []
    for position in range(length):
        token = speech.token(position)
        token = 100 + position if token is None else token
        if token == MODEL.eos_token_id:
            break
        output.append((token, speech.marks.get(token) or MODEL.text(token)))
    return output


def heard(
    parsing: OutputParsing, pieces: list[str], tokens: list[int]
) -> tuple[list[StepParts], SpeechParser]:
    parser = SpeechParser(Speech(MODEL, parsing, PROMPT, ends=True), parsing)
    made = [parser.take(piece, (), finished=False) for piece in pieces]
    return [*made, parser.take("", tokens, finished=True)], parser


def joined(parts: list[StepParts]) -> tuple[str, str, list[str]]:
    calls: dict[int, str] = {}
    for part in parts:
        for piece in part.tool_calls:
            calls[piece.index] = calls.get(piece.index, "") + piece.name + piece.arguments
    return "".join(p.text for p in parts), "".join(p.reasoning for p in parts), list(calls.values())


@pytest.mark.parametrize(
    ("choice", "alone", "names"),
    [
        ("none", False, []),
        ("required", False, ["sea", "hill"]),
        ("required", True, ["sea"]),
        ("auto", True, None),
    ],
)
def test_calls_come_as_the_request_wants_them(choice: str, alone: bool, names: list[str] | None) -> None:
    parsing = OutputParsing(tools=TOOLS, tool_choice=choice, parallel_tool_calls=not alone)
    output = said(parsing)
    parts, _ = heard(parsing, [text for _, text in output], [token for token, _ in output])
    calls = joined(parts)[2]
    if names is None:
        assert len(calls) in (0, 1)
        return
    assert len(calls) == len(names)
    for name, call in zip(names, calls, strict=True):
        assert list(json.loads(call.removeprefix(name))) == ["words"]


def test_reasoning_comes_where_the_template_says_so_and_is_told_where_wanted() -> None:
    for told in (True, False):
        parsing = OutputParsing(template_kwargs=THINKING, reasoning=told)
        output = said(parsing, length=15)
        parts, parser = heard(parsing, [text for _, text in output], [token for token, _ in output])
        content, reasoning, _ = joined(parts)
        assert len(content.split()) == 5
        assert len(reasoning.split()) == (8 if told else 0)
        assert parser.reasoning_tokens() == 8


@given(st.lists(st.integers(min_value=1, max_value=9)))
def test_it_does_not_matter_where_text_is_cut(lengths: list[int]) -> None:
    parsing = OutputParsing(tools=TOOLS, tool_choice="required", template_kwargs=THINKING)
    text = "".join(piece for _, piece in said(parsing)) + " <cal"
    pieces, at = [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    parts, _ = heard(parsing, [*pieces, text[at:]], [])
    assert joined(parts) == joined(heard(parsing, [text], [])[0])
    assert sum(part.taken for part in parts) == len(text)
