"""The tools, calls and results of the chats that `kvasir-tiny` practises on.

Why this exists: there is no public-domain set of such chats. Tools, schemas and sentences are put
together anew each time, so that only reading them helps: the tool is the one whose words the user
says, arguments come from the user's words, and the answer says what the tool returned.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

from tiny_chat import ChatMaker
from tiny_everyday import NAMES as KNOWN_NAMES
from tiny_everyday import Drawn, draw
from tiny_phrases import (
    ACTION,
    AGAIN,
    ARGUMENT,
    BARE,
    HAND_OVER,
    SINGLE,
    TOGETHER,
)
from tiny_words import ENUMS, KINDS, STATES, TEXTS, VERBS, Words, held_out, listed, spoken

Calls = list[tuple[str, dict[str, Any]]]
Pieces = list[tuple[str, bool]]
LISTED = ("string", "integer", "place", "person", "country")


@dataclass
class Tool:
    """A function: `words` is what a user calls it by, (verb, thing); `asks` are questions of its own."""

    name: str
    words: tuple[str, str]
    described: str | None
    schema: dict[str, Any]
    kinds: dict[str, tuple[str, list[str]]]
    asks: tuple[str, ...] = ()
    strict: bool = False

    def line(self) -> str:
        """The tool as the chat template shows it."""
        function = {"name": self.name, "description": self.described, "parameters": self.schema}
        if self.strict:
            function["strict"] = True
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


@dataclass
class Case:
    """A chat up to where the model speaks, and what it should say."""

    kind: str
    pieces: Pieces
    calls: Calls = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return "".join(text for text, _ in self.pieces[:-1])

    @property
    def answer(self) -> str:
        return self.pieces[-1][0]


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def spaced(value: object) -> str:
    """JSON as the grammar of an object without a schema has it: with a space after each comma."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ":"))


def written(name: str, given: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


def said(calls: Calls) -> str:
    """Calls as the model writes them: arguments compact, as under the grammar of a forced call."""
    return "\n".join(written(name, compact(given)) for name, given in calls)


def shown(calls: Calls) -> str:
    """Calls as the chat template shows them once they are made."""
    return "".join("\n" + written(name, json.dumps(given, ensure_ascii=False)) for name, given in calls)


class Toolbox:
    """Makes tools, calls and results. `kept`: of the tools and schemas that are kept for the tests.
    `level`, 0 to 1: how many tools and arguments there are; `known`: share of known tools."""

    def __init__(self, words: Words, chats: ChatMaker, kept: bool = False) -> None:
        self.words, self.chats, self.kept, self.level = words, chats, kept, 1.0
        self.known = 0.25
        self.rng = random.Random(0)

    def seed(self, seed: int) -> None:
        self.rng = self.words.rng = self.chats.rng = random.Random(seed)

    def kinds(self) -> list[str]:
        """The types of a schema's properties, in a shape that is for this maker."""
        while True:
            count = self.rng.choice((0, 1, 1, 1, 2, 2, 3, 4)[: 5 + round(3 * self.level)])
            drawn = self.rng.choices(KINDS, (5, 3, 1, 1, 1.5, 1), k=count)
            if count < 3 or held_out(" ".join(drawn)) == self.kept:
                return drawn

    def key(self, kind: str) -> str:
        """A key; which keys have which type is kept for the tests too."""
        while held_out(f"{kind} {(key := self.words.key())}") != self.kept:
            pass
        return key

    def schema(
        self, drawn: list[str], keys: list[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, tuple[str, list[str]]]]:
        """A JSON schema of an object, and the type and choices of each key."""
        rng = self.rng
        properties: dict[str, Any] = {}
        kinds: dict[str, tuple[str, list[str]]] = {}
        noted, titled, turned = rng.random() < 0.4, rng.random() < 0.15, rng.random() < 0.3
        for kind, key in zip(drawn, keys or [self.key(kind) for kind in drawn], strict=True):
            choices: list[str] = []
            if kind == "degrees":
                choices = ENUMS[0]
            elif kind == "enum":
                own = rng.sample(self.words.things, rng.randint(2, 4))
                choices = own if rng.random() < 0.7 else rng.choice(ENUMS)
            one: dict[str, Any] = {"title": key.replace("_", " ").title()} if titled else {}
            note = {"description": f"The {key.replace('_', ' ')}."} if noted else {}
            one |= note if turned else {}
            one["type"] = "string" if kind in TEXTS else kind
            if kind == "array":
                one["items"] = {"type": "string"}
            if choices:
                one["enum"] = choices
            one |= note
            properties[key], kinds[key] = one, (kind, choices)
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if properties and rng.random() < 0.8:
            schema["required"] = list(properties)[: rng.randint(1, len(properties))]
        if rng.random() < 0.15:
            schema["additionalProperties"] = False
        if turned:  # the order in which libraries that read Python's types write it
            schema["type"] = schema.pop("type")
        return schema, kinds

    def tool(self, near: Tool | None = None) -> Tool:
        """A tool; with `near`, perhaps one that shares a word with it."""
        if not self.kept and self.rng.random() < self.known:
            return self.known_tool(draw(self.rng))
        while held_out((tool := self.any_tool(near)).name) != self.kept or tool.name in KNOWN_NAMES:
            pass
        return tool

    def described(self, verb: str, thing: str) -> str | None:
        many = " ".join(self.rng.choices(self.words.things, k=self.rng.randint(2, 8)))
        return self.rng.choice(
            (
                None,
                f"{verb.capitalize()} the {thing} in a {self.words.thing().replace('_', ' ')}.",
                f"{verb.capitalize()} a {thing}: {many}.",
                f"{verb.capitalize()} the {thing}.",
                f"{verb.capitalize()} the {thing} that the user asks for.",
                f"{verb.capitalize()}s a {thing}.",
            )
        )

    def known_tool(self, drawn: Drawn) -> Tool:
        schema, kinds = self.schema(drawn.kinds, drawn.keys)
        if drawn.keys:
            schema["required"] = drawn.keys
        return Tool(drawn.name, drawn.words, self.described(*drawn.words), schema, kinds, drawn.asks)

    def desk(self) -> Tool:
        """A tool that hands the user over to somebody."""
        thing = self.words.thing()
        spoken_thing = thing.replace("_", " ")
        asks = tuple(form.format(spoken_thing) for form in HAND_OVER)
        described = f"Handoff to the {thing} agent to handle the request. "
        schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        return Tool(f"transfer_to_{thing}", ("transfer", spoken_thing), described, schema, {}, asks)

    def any_tool(self, near: Tool | None) -> Tool:
        rng = self.rng
        if rng.random() < 0.04:
            return self.desk()
        verb, thing = rng.choice(VERBS), self.words.thing()
        if near and rng.random() < 0.4:
            verb, thing = rng.choice(((near.words[0], thing), (verb, near.words[1].replace(" ", "_"))))
        if rng.random() < 0.2:
            thing = f"{rng.choice(self.words.things)}_{thing}"
        name = rng.choice(
            (f"{verb}_{thing}",) * 5 + (verb + thing.title().replace("_", ""), thing, f"{thing}_{verb}")
        )
        spoken_thing = thing.replace("_", " ")
        return Tool(
            name, (verb, spoken_thing), self.described(verb, spoken_thing), *self.schema(self.kinds())
        )

    def toolset(self) -> list[Tool]:
        tools = [self.tool()]
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 3)[: 3 + round(3 * self.level)])):
            other = self.tool(tools[0])
            if all(other.name != tool.name and other.words != tool.words for tool in tools):
                tools.append(other)
        strict = self.rng.random() < 0.15
        tools = [replace(tool, strict=strict) for tool in tools]
        self.rng.shuffle(tools)
        return tools

    def given(self, kinds: dict[str, tuple[str, list[str]]], required: list[str]) -> dict[str, Any]:
        """Arguments for a schema; optional ones are left out now and then."""
        return {
            key: self.words.value(*kinds[key])
            for key in kinds
            if key in required or len(kinds) == 1 or self.rng.random() < 0.6
        }

    def arguments(self, given: dict[str, Any], ordered: bool = False) -> str:
        """Arguments as a user lists them, each with its key."""
        rng, form = self.rng, self.rng.choice(ARGUMENT)
        parts = [
            form.format(key=key.replace("_", " ") if rng.random() < 0.8 else key, value=spoken(value, rng))
            for key, value in given.items()
        ]
        if not ordered and rng.random() < 0.25:
            rng.shuffle(parts)
        return listed(parts) if rng.random() < 0.5 else ", ".join(parts)

    def asked(self, tool: Tool, given: dict[str, Any]) -> str:
        """What the user says to have `tool` called with `given`."""
        rng, values = self.rng, list(given.values())
        forms, value = ACTION, ""
        if tool.asks and rng.random() < 0.8:
            return rng.choice(tool.asks).format(*(spoken(value, rng) for value in values))
        if not given:
            forms = BARE
        elif len(given) == 1 and not isinstance(values[0], bool) and rng.random() < 0.6:
            forms, value = SINGLE, spoken(values[0], rng)
        return rng.choice(forms).format(
            action=f"{tool.words[0]} the {tool.words[1]}",
            Action=f"{tool.words[0].capitalize()} the {tool.words[1]}",
            thing=tool.words[1],
            Thing=tool.words[1].capitalize(),
            name=tool.name,
            value=value,
            args=self.arguments(given) if given else "",
        )

    def call(self, tool: Tool) -> tuple[str, tuple[str, dict[str, Any]]]:
        given = self.given(tool.kinds, tool.schema.get("required", []))
        return self.asked(tool, given), (tool.name, given)

    def parallel(self, tools: list[Tool]) -> tuple[str, Calls]:
        """Two or three calls asked for at once, of one tool or several."""
        rng = self.rng
        single = [t for t in tools if len(t.kinds) == 1 and next(iter(t.kinds.values()))[0] in LISTED]
        if single and rng.random() < 0.6:
            tool = rng.choice(single)
            key, (kind, _) = next(iter(tool.kinds.items()))
            values = [self.words.value(kind, []) for _ in range(rng.choice((2, 2, 3)))]
            quote = rng.choice(("{}", "{}", '"{}"')) if kind == "string" else "{}"
            forms = [form for form in tool.asks if "({})" not in form]
            text = rng.choice(forms or SINGLE[:-2]).format(
                listed([quote.format(value) for value in values]),
                action=f"{tool.words[0]} the {tool.words[1]}",
                Action=f"{tool.words[0].capitalize()} the {tool.words[1]}",
                thing=tool.words[1],
                Thing=tool.words[1].capitalize(),
                name=tool.name,
                value=listed([quote.format(value) for value in values]),
            )
            return text, [(tool.name, {key: value}) for value in values]
        if len(single) > 1 and rng.random() < 0.5:
            one, two = rng.sample(single, 2)
            value = self.words.value("place", [])
            text = rng.choice(TOGETHER).format(one.words[1], two.words[1], value)
            calls = [(tool.name, {next(iter(tool.kinds)): value}) for tool in (one, two)]
            if all(tool.kinds[next(iter(tool.kinds))][0] != "integer" for tool in (one, two)):
                return text, calls
        chosen = rng.sample(tools, min(len(tools), rng.choice((2, 2, 3))))
        asked, calls = zip(*(self.call(tool) for tool in chosen), strict=True)
        joint = rng.choice((" Then ", " Also ", " And ", "\n"))
        return joint.join(text if text[-1] in ".?" else text + "." for text in asked), list(calls)

    def same(self, tools: list[Tool], calls: Calls) -> Tool | None:
        """The tool of a single call whose only argument may be asked for anew."""
        found = next(tool for tool in tools if tool.name == calls[0][0])
        kinds = [kind for kind, _ in found.kinds.values()]
        return found if len(calls) == 1 and kinds in (["string"], ["place"]) else None

    def again(self, tool: Tool) -> tuple[str, Calls]:
        """The question that follows one, and its call."""
        value = self.words.value("place", [])
        return self.rng.choice(AGAIN).format(tool.words[1], value), [
            (tool.name, {next(iter(tool.kinds)): value})
        ]

    def result(self, tool: Tool) -> tuple[str, str]:
        """What a tool returns, and what is said of it."""
        rng, drawn, thing = self.rng, self.rng.random(), tool.words[1]
        if drawn < 0.15:
            place = rng.choice((self.words.known("place"), self.words.thing().replace("_", " ")))
            state = rng.choice((rng.choice(STATES), rng.choice(self.words.things)))
            value = f"{state} in {place}" if rng.random() < 0.6 else state
            return value, f"The {thing} is {value}."
        if drawn < 0.45:
            value = self.words.value(rng.choice(("string", "string", "integer", "number")), [])
            return str(value), f"The {thing} is {value}."
        if drawn < 0.85:
            keys = [self.words.key() for _ in range(rng.choice((1, 1, 2, 3)))]
            found = {key: self.words.value(rng.choice(("string", "integer", "number")), []) for key in keys}
            text = listed([f"the {key.replace('_', ' ')} is {value}" for key, value in found.items()])
            return json.dumps(found, ensure_ascii=False), f"T{text[1:]}."
        why = " ".join(rng.choices(self.words.things, k=rng.randint(1, 3)))
        return f"Error: {why}", f"That did not work: {why}."
