"""Keeps control tokens that clients write in their texts apart from those of the chat template.

A tokenizer turns text that reads like a special token into that token, wherever the text is from: a document
in a message could end the user's turn and begin a system's. So what clients write is tokenized as ordinary
text, as Hugging Face's `split_special_tokens` does. A template puts both into one text. Before it renders, a
character that occurs nowhere in the request breaks the special tokens in the client's strings; afterwards the
text is cut at the special tokens that are left, which are the template's own, and each part with the
character is tokenized without it, and without special tokens.

Parts between special tokens do not depend on each other, under the conditions of `prefix_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.prompt.prefix_tokens import AddedText, alike, tokenizer_rules

_MARKS = range(0xE000, 0xF900)
"""Unicode's private use area, which has no meaning in text, nor for templates that trim or format it."""
_RARE = "|^~\\`$<>[]{}_#@"
"""Characters of special tokens from the rarest in other text: a search for one character is much faster than
one for several."""
_MAX_INLINE_BYTES = 8 << 10
"""Size of a body whose values can be searched for control tokens on the event loop."""
_SCALARS = frozenset((int, float, bool, type(None)))
_WHITE = "[\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]*"
"""White space that a special token may absorb, by Unicode's definition."""


class UserText(str):
    """A prompt in which clients wrote control tokens. `mark` breaks each of them; without a mark, all of the
    prompt is the client's."""

    __slots__ = ("mark",)
    mark: str

    def __new__(cls, text: str, mark: str = "") -> UserText:
        """Return `text` with its mark."""
        made = super().__new__(cls, text)
        made.mark = mark
        return made


class Piece(NamedTuple):
    """A part of a prompt. `ordinary`: without special tokens."""

    text: str
    ordinary: bool


class ControlTokens:
    """The special tokens of a tokenizer, at least one. `cuts`: whether texts may be cut at them."""

    def __init__(self, tokens: Sequence[AddedText], *, cuts: bool) -> None:
        self.cuts = cuts
        ordered = sorted(tokens, key=lambda token: -len(token.content))
        contents = [token.content for token in ordered]
        self._written = re.compile("|".join(map(re.escape, contents)))
        self._of_template = re.compile("|".join(map(_with_space, ordered)))
        self._beginnings = frozenset(text[:size] for text in contents for size in range(1, len(text)))
        self._firsts = sorted({text[0] for text in contents})
        self._longest = len(contents[0])
        self._rare = sorted({min(text, key=_rarity) for text in contents})
        first = "|".join(map(re.escape, self._firsts))
        self._rare_in_json = [char.encode() for char in self._rare]
        self._written_in_json = re.compile(self._written.pattern.encode())
        self._firsts_in_json = [first.encode() for first in self._firsts]
        self._open_in_json = re.compile(f'(?:{first})[^"]{{0,{4 * self._longest}}}"'.encode())
        self._spelled = any(_json_escapes(text) for text in contents)

    def takes_long(self, body: bytes, size: int) -> bool:
        """Return whether a client's conversation of `size` bytes may take longer to render than others of its
        size. `body` is what of it was sent; what was stored before is not looked into."""
        return size > _MAX_INLINE_BYTES and (
            self._spelled or size > len(body) or b"\\u" in body or self._may_be_in_json(body)
        )

    def prompt(self, text: str) -> str:
        """Return a prompt, which is the client's as a whole."""
        return UserText(text) if self._has(text) else text

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        more: Sequence[Any],
        render: Callable[[Sequence[Any], Sequence[Any]], str],
    ) -> str:
        """Return what `render` makes of a client's `messages` and of `more`, its other parts as JSON. Raise
        RequestError if no character is left to mark control tokens with."""
        if not self.cuts or not (any(map(self._is_in, messages)) or any(map(self._may_be_in, more))):
            return render(messages, more)
        used = set(msgspec.json.encode((messages, more)).decode())
        mark = next((char for char in map(chr, _MARKS) if char not in used), None)
        if mark is None:
            raise RequestError(
                "The conversation has control tokens, and all characters of Unicode's private use area.",
                code="invalid_value",
                param="messages",
            )
        text = render(self._marked(messages, mark), self._marked(more, mark))
        return UserText(text, mark) if mark in text else text

    def pieces(self, text: UserText) -> list[Piece]:
        """Return the parts of a prompt to tokenize, in order."""
        if not text.mark:
            return [Piece(text, ordinary=True)]
        found: list[Piece] = []
        begin = last = 0
        for start, end in (*(match.span() for match in self._of_template.finditer(text)), (len(text),) * 2):
            between = text[last:start]
            if text.mark in between:
                found += [Piece(text[begin:last], ordinary=False)] if last > begin else []
                found.append(Piece(between.replace(text.mark, ""), ordinary=True))
                begin = start
            last = end
        return [*found, Piece(text[begin:], ordinary=False)] if begin < len(text) else found

    def _has(self, text: str) -> bool:
        for char in self._rare:
            if char in text:
                return self._written.search(text) is not None
        return False

    def _is_open(self, text: str) -> bool:
        """Whether a control token begins at the end of `text`, which what follows may complete."""
        tail = text[1 - self._longest :]
        for first in self._firsts:
            at = tail.find(first)
            while at >= 0:
                if tail[at:] in self._beginnings:
                    return True
                at = tail.find(first, at + 1)
        return False

    def _is_in(self, message: Mapping[str, Any]) -> bool:
        for name, value in message.items():
            if name == "role":
                continue
            if self._has(value) or self._is_open(value) if type(value) is str else self._may_be_in(value):
                return True
        return False

    def _may_be_in(self, value: Any) -> bool:
        """Whether strings of a JSON value may have control tokens: tools have many strings, and one search in
        their JSON takes less time than one in each."""
        if not value or self._spelled:
            return bool(value)
        return self._may_be_in_json(msgspec.json.encode(value))

    def _may_be_in_json(self, data: bytes) -> bool:
        if any(char in data for char in self._rare_in_json) and self._written_in_json.search(data):
            return True
        firsts = any(first in data for first in self._firsts_in_json)
        return firsts and self._open_in_json.search(data) is not None

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._broken(value, mark)
        if isinstance(value, Mapping):
            return {
                self._broken(key, mark): each if type(each) in _SCALARS else self._marked(each, mark)
                for key, each in value.items()
            }
        if not isinstance(value, list | tuple):
            return value
        return [each if type(each) in _SCALARS else self._marked(each, mark) for each in value]

    def _broken(self, text: str, mark: str) -> str:
        # What is left of a broken token may read like a shorter one.
        while self._has(text):
            text = self._written.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text + mark if self._is_open(text) else text


def control_tokens(tokenizer_json: bytes) -> ControlTokens | None:
    """Return the special tokens of a tokenizer.json. None if it has none, or matches them in other ways than
    letter by letter."""
    rules = tokenizer_rules(tokenizer_json)
    if rules is None:
        return None
    special = [token for token in rules.added_tokens if token.special and token.content]
    literal = all(
        len(token.content) > 1
        and not token.single_word
        and not (token.normalized and rules.normalizer is not None)
        for token in special
    )
    return ControlTokens(special, cuts=alike(rules.pre_tokenizer)) if special and literal else None


def _rarity(char: str) -> int:
    return -1 if not char.isascii() else _RARE.find(char) % 100


def _json_escapes(text: str) -> bool:
    """Return whether JSON spells `text` with escapes."""
    return msgspec.json.encode(text) != b'"%b"' % text.encode()


def _with_space(token: AddedText) -> str:
    return (_WHITE if token.lstrip else "") + re.escape(token.content) + (_WHITE if token.rstrip else "")
