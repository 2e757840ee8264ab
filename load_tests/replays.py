"""Workloads that share prefixes in practice: growing chats, questions about documents, agents with tools.

A replay consists of sessions. Each session is a list of steps that send the conversation so far with
additional messages. Everything is generated from a seed, so that a run can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

_LEXICON = (
    "the of and a to in is that it was for on are as with his they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how up out "
    "them then she many some so these would other into has more her two like him see time could no make "
    "than first been its who now people my made over did down only way find use may water long little "
    "very after words called just where most know 17 203 4.5 Zürich naïve"
)
WORDS = tuple(_LEXICON.split())

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Session:
    """One client's steps. The messages of a step are appended to the conversation before it is sent, and the
    answer after it."""

    steps: tuple[tuple[Message, ...], ...]


def chats(rng: random.Random, sessions: int, turns: int) -> list[Session]:
    """Conversations of a few applications, each with its own system prompt."""
    systems = [_text(rng, 120) for _ in range(3)]
    return [
        Session(
            tuple(
                _turn(_text(rng, rng.randrange(10, 90)), system=systems[number % 3] if turn == 0 else None)
                for turn in range(turns)
            )
        )
        for number in range(sessions)
    ]


def documents(rng: random.Random, sessions: int, questions: int) -> list[Session]:
    """Questions about shared documents, which precede the question in the order of a ranking."""
    library = [_text(rng, rng.randrange(150, 450)) for _ in range(6)]
    made = []
    for _ in range(sessions):
        steps = []
        for question in range(questions):
            found = sorted(rng.sample(range(len(library)), 2))
            shown = "\n\n".join(f"Document {i}:\n{library[i]}" for i in found)
            if question == 0:
                steps.append(
                    _turn(f"{shown}\n\nQuestion: {_text(rng, 12)}", system="Answer from the documents.")
                )
            else:
                steps.append(_turn(f"And: {_text(rng, 12)}"))
        made.append(Session(tuple(steps)))
    return made


def agents(rng: random.Random, sessions: int, steps: int) -> list[Session]:
    """Agents of one kind: the same tool descriptions before different tasks, then results of tool calls."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": _text(rng, 25),
                "parameters": {
                    "type": "object",
                    "properties": {word: {"type": "string"} for word in rng.sample(WORDS[:40], 3)},
                },
            },
        }
        for number in range(8)
    ]
    system = "You act with tools.\n" + "\n".join(json.dumps(tool) for tool in tools)
    return [
        Session(
            tuple(
                _turn(f"Task: {_text(rng, 20)}", system=system)
                if step == 0
                else _turn(
                    f"Result: {json.dumps({'rows': [_text(rng, 8) for _ in range(rng.randrange(1, 6))]})}"
                )
                for step in range(steps)
            )
        )
        for _ in range(sessions)
    ]


REPLAYS: dict[str, Callable[[random.Random, int, int], list[Session]]] = {
    "chats": chats,
    "documents": documents,
    "agents": agents,
}


def _turn(content: str, system: str | None = None) -> tuple[Message, ...]:
    first = () if system is None else ({"role": "system", "content": system},)
    return (*first, {"role": "user", "content": content})


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))
