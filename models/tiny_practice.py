"""Chats in which `kvasir-tiny` practises tools and JSON, and those that it is tested on.

Why this exists: there is no public-domain set of such chats. The parts that tiny_tools makes are put
together anew each time, so that only reading them helps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tiny_chat import SPECIALS, SYSTEMS
from tiny_everyday import record
from tiny_phrases import ASK_JSON, GUIDE, MAKE, USE_TOOLS, WITH_KEYS
from tiny_tools import Calls, Case, Pieces, Tool, Toolbox, compact, said, shown, spaced
from tiny_words import listed

TOOLS_HEAD = "Tools, one JSON object per line:"


class ToolMaker(Toolbox):
    """Makes chats with tools and JSON; `drill`: share of lists of words."""

    drill = 0.0

    def json_turn(self, inside: bool) -> tuple[str, str, str]:
        """(guide, question, answer): JSON by a schema that the chat shows (`inside`) or by the question."""
        fields = record(self.rng) if inside and not self.kept and self.rng.random() < self.known else None
        schema, kinds = (
            self.schema(fields.kinds, fields.keys) if fields else self.schema(self.kinds() or ["string"])
        )
        given = {key: self.words.value(*kinds[key]) for key in kinds}
        question = self.arguments(given, ordered=not inside)
        if fields and self.rng.random() < 0.8:
            question = self.rng.choice(fields.asks).format(*given.values())
        guide = self.rng.choice(GUIDE).format(json.dumps(schema)) if inside else ""
        ask = self.rng.choice(ASK_JSON)
        forms = [f"{ask} {question}", f"{question}. {ask}", question if inside else f"{ask}\n{question}"]
        return guide, self.rng.choice(forms), self.rng.choice((compact, compact, spaced))(given)

    def json_chat(self, inside: bool) -> Case:
        guide, question, answer = self.json_turn(inside)
        system = self.rng.choice(SYSTEMS) if self.rng.random() < 0.2 else ""
        if guide and self.rng.random() < 0.5:
            system, guide = f"{system}\n{guide}" if system else guide, ""
        opening = "<|bos|>" + (f"<|system|>{system}<|end|>" if system else "")
        asked = f"{opening}<|user|>{question}{chr(10) + guide if guide else ''}<|end|><|assistant|>"
        kind = "json by schema" if inside else "json by words"
        return Case(kind, [(asked, False), (f"{answer}<|end|>", True)])

    def made_json(self, bound: bool) -> Case:
        """JSON whose texts the model makes up, with keys that the question names; `bound`: with keys that a
        grammar writes, so that only the texts are learned."""
        rng = self.rng
        keys = rng.choice((["setup", "punchline"], [self.words.key() for _ in range(rng.randint(1, 3))]))
        keys = list(dict.fromkeys(keys))
        asked = rng.choice(MAKE).format(
            rng.choice(("joke", *self.words.things)), rng.choice(self.words.things)
        )
        if not bound:
            quoted = listed([rng.choice(("'{}'", '"{}"', "{}")).format(key) for key in keys])
            asked = rng.choice(WITH_KEYS).format(asked, quoted)
        pieces = [(f"<|bos|><|user|>{asked}<|end|><|assistant|>", False)]
        given = {key: self.chats.saying() for key in keys}
        if not bound:
            return Case("json made", [*pieces, (rng.choice((compact, spaced))(given) + "<|end|>", True)])
        return Case("json made", pieces + self.bound_pieces(given))

    def bound_pieces(self, given: dict[str, Any]) -> Pieces:
        """An answer in JSON of which a grammar writes the keys."""
        texts = [(key, compact(value)) for key, value in given.items()]
        pieces: Pieces = []
        start = '{"'
        for number, (key, text) in enumerate(texts, 1):
            quote = '"' if text[0] == '"' else ""
            pieces.append((f'{start}{key}":{quote}', False))
            pieces.append((text.removeprefix('"') + (',"' if number < len(texts) else "}"), True))
            start = ""
        return [*pieces, ("<|end|>", True)]

    def bound_json(self) -> Case:
        """JSON by a schema that the chat does not show."""
        fields = record(self.rng)
        _, kinds = self.schema(fields.kinds, fields.keys)
        given = {key: self.words.value(*kinds[key]) for key in kinds}
        asked = self.rng.choice(fields.asks).format(*given.values())
        opening = f"<|bos|><|user|>{asked}<|end|><|assistant|>"
        return Case("json bound", [(opening, False), *self.bound_pieces(given)])

    def forced(self) -> Case:
        """A call that a grammar forces: of a named tool its arguments, or a list of calls of any. Only what
        is left to the model is learned."""
        tools = self.toolset()
        several = len(tools) > 1 and self.rng.random() < 0.3
        asked, calls = self.tool_turn(tools, "parallel" if several else "one")
        pieces = [(f"{self.opening(tools)}<|user|>{asked}<|end|><|assistant|>", False)]
        if len(calls) == 1 and self.rng.random() < 0.3:
            text = compact(calls[0][1])
            start = '{"' if calls[0][1] else "{"
            return Case("forced", [*pieces, (start, False), (text.removeprefix(start) + "<|end|>", True)])
        for number, (name, given) in enumerate(calls, 1):
            pieces.append((('[{"name":"' if number == 1 else '{"name":"'), False))
            pieces += [(f'{name}","', True), ('parameters":', False)]
            pieces.append((compact(given) + ("}," if number < len(calls) else "}]<|end|>"), True))
        return Case("forced", pieces)

    def opening(self, tools: list[Tool]) -> str:
        system = self.rng.choice((*SYSTEMS, *USE_TOOLS)) + "\n\n" if self.rng.random() < 0.35 else ""
        lines = "\n".join([TOOLS_HEAD, *(tool.line() for tool in tools)])
        return f"<|bos|><|system|>{system}{lines}<|end|>"

    def tool_turn(self, tools: list[Tool], kind: str) -> tuple[str, Calls]:
        if kind == "parallel":
            return self.parallel(tools)
        asked, call = self.call(self.rng.choice(tools))
        return asked, [call]

    def case(self, kind: str) -> Case:
        """One question: 'one', 'none', 'parallel', 'result', 'json by schema' or 'json by words'."""
        if kind.startswith("json"):
            return self.json_chat(kind == "json by schema")
        tools = self.toolset()
        while kind == "parallel" and len(tools) < 2:
            tools = self.toolset()
        return Case(kind, *self.chat(tools, [kind], learned=False), tools)

    def unanswered(self, tools: list[Tool]) -> tuple[str, str]:
        """A question that no tool is called for."""
        drawn = self.rng.random()
        if drawn < 0.25:
            return self.refused({tool.name for tool in tools})
        return self.chats.talk() if drawn < 0.75 else self.chats.turn()

    def refused(self, known: set[str]) -> tuple[str, str]:
        """What a tool would be called for that is not among the `known`."""
        while (tool := self.any_tool(None)).name in known:
            pass
        given = self.given(tool.kinds, list(tool.kinds))
        return self.asked(tool, given), f"I have no tool for the {tool.words[1]}."

    def toolless(self) -> Pieces:
        """A chat without tools, in which none can be called."""
        system = f"<|system|>{self.rng.choice(SYSTEMS)}<|end|>" if self.rng.random() < 0.3 else ""
        question, answer = self.refused(set())
        return [(f"<|bos|>{system}<|user|>{question}<|end|><|assistant|>", False), (f"{answer}<|end|>", True)]

    def chat(self, tools: list[Tool], kinds: list[str], learned: bool = True) -> tuple[Pieces, Calls]:
        """The pieces of a chat with one question of each kind, and the calls of the last."""
        rng, pieces, opening = self.rng, [], self.opening(tools)
        calls: Calls = []
        last: Tool | None = None
        for kind in kinds:
            if kind == "none":
                calls = []
                question, answer = self.unanswered(tools)
                pieces += [
                    (f"{opening}<|user|>{question}<|end|><|assistant|>", False),
                    (f"{answer}<|end|>", True),
                ]
                opening = ""
                continue
            several = kind == "result" and len(tools) > 1 and rng.random() < 0.3
            question, calls = self.tool_turn(tools, "parallel" if several or kind == "parallel" else "one")
            if last and not several and kind != "parallel" and rng.random() < 0.3:
                question, calls = self.again(last)
            last = self.same(tools, calls)
            pieces.append((f"{opening}<|user|>{question}<|end|><|assistant|>", False))
            opening = ""
            if kind != "result":
                pieces.append((f"{said(calls)}<|end|>", True))
                continue
            own = learned and rng.random() < 0.5  # the call is the model's, or shown as it was made
            pieces.append((f"{said(calls)}<|end|>", True) if own else (f"{shown(calls)}<|end|>", False))
            by_name = {tool.name: tool for tool in tools}
            results = [self.result(by_name[name]) for name, _ in calls]
            turns = "".join(f"<|tool|>{text}<|end|>" for text, _ in results)
            pieces += [(f"{turns}<|assistant|>", False), (" ".join(s for _, s in results) + "<|end|>", True)]
        return pieces, calls

    def list_chat(self) -> Case:
        """Words to write again in another form: the shortest practice in reading them letter by letter."""
        rng = self.rng
        words = [rng.choice(self.words.spelled) for _ in range(rng.randint(1, 12))]
        few, plain = words[:4], " ".join(words)
        asked, answer = rng.choice(
            (
                (f"JSON list: {plain}", compact(words)),
                (f"JSON list: {plain}", compact(words)),
                (f"Join with _: {' '.join(few)}", "_".join(few).lower()),
                (f"Read: {json.dumps(words)}", plain),
            )
        )
        return Case(
            "list", [(f"<|bos|><|user|>{asked}<|end|><|assistant|>", False), (f"{answer}<|end|>", True)]
        )

    def conversation(self) -> Iterator[tuple[str, bool]]:
        """The pieces of a chat to learn from."""
        if self.rng.random() < self.drill:
            yield from self.list_chat().pieces
            return
        drawn = self.rng.random()
        if drawn < 0.3:
            yield from self.json_chat(self.rng.random() < 0.5).pieces
            return
        if drawn < 0.36:
            yield from (self.bound_json() if drawn < 0.32 else self.made_json(drawn < 0.33)).pieces
            return
        if drawn < 0.39:
            yield from self.toolless()
            return
        if drawn < 0.47:
            yield from self.forced().pieces
            return
        tools = self.toolset()
        weights = (4, 1, 2, 2) if len(tools) > 1 else (4, 1, 0, 2)
        count = self.rng.randint(1, 4)
        yield from self.chat(
            tools, self.rng.choices(("one", "none", "parallel", "result"), weights, k=count)
        )[0]


def samples(maker: ToolMaker, count: int = 3000) -> list[str]:
    """Chats as text without the tokens that control them, for a tokenizer to learn from."""
    found = []
    for number in range(count):
        maker.seed(number)
        text = "".join(piece for piece, _ in maker.conversation())
        found.append(re.sub("|".join(map(re.escape, SPECIALS)), "\n", text))
    return found
