"""Caches the tokens of text tokenized before: each turn of a conversation repeats all earlier ones.

A text may be cut where the tokenizer's rules make both sides independent: right after an added token that is
always matched literally. All other steps (normalization, pre-tokenization, merging) happen between added
tokens and never across them. So the tokens of such a segment are the same at any position. `cut_marker` finds
such a token; if it is not certain, it returns None.

Tokens are shared only within the scope that shares KV: a segment is found only under the salt it was stored
under, since tokenization time would reveal whether someone else had sent the prompt.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MIN_CHARS = 1024
"""Minimum length of a segment in characters; tokenizing a shorter one costs little more than the lookup."""
_ENTRY_BYTES = 400
"""Size of an entry without its text and tokens, in bytes."""
_LARGEST_SHARE = 4
"""Maximum share of the budget for one segment."""

_INDEPENDENT = frozenset(
    (
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Punctuation",
        "Sequence",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    )
)
"""Pre-tokenizers that treat every stretch between added tokens alike."""


class AddedText(msgspec.Struct):
    """A token that is matched as text before all others."""

    content: str = ""
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class PreTokenizer(msgspec.Struct):
    """A pre-tokenizer, with its steps if it is a sequence."""

    type: str = ""
    prepend_scheme: str | None = None
    pretokenizers: list[PreTokenizer] = []


class _Model(msgspec.Struct):
    dropout: float | None = None


class TokenizerRules(msgspec.Struct):
    """The relevant parts of a tokenizer.json; the vocabulary, most of the file, is skipped."""

    added_tokens: list[AddedText] = []
    normalizer: object = None
    pre_tokenizer: PreTokenizer | None = None
    model: _Model = msgspec.field(default_factory=_Model)


def tokenizer_rules(tokenizer_json: bytes) -> TokenizerRules | None:
    """Return the relevant parts of a tokenizer.json; None if the file is invalid."""
    try:
        return msgspec.json.decode(tokenizer_json, type=TokenizerRules)
    except msgspec.MsgspecError:
        return None


def cut_marker(tokenizer_json: bytes, conversation: str) -> str | None:
    """Return the added token after which texts may be cut: of all suitable ones the most frequent in
    `conversation`, a rendered chat. None if there is none, or the file is invalid."""
    rules = tokenizer_rules(tokenizer_json)
    if rules is None:
        return None
    added = [token for token in rules.added_tokens if token.content]
    # With dropout, encodings of equal texts may differ.
    if rules.model.dropout or any(token.single_word for token in added) or not alike(rules.pre_tokenizer):
        return None
    contents = [token.content for token in added]
    allowed = [
        token.content
        for token in added
        if token.content in conversation
        and not (token.lstrip or token.rstrip)
        and not (token.normalized and rules.normalizer is not None)
    ]
    allowed.sort(key=lambda content: (-conversation.count(content), content))
    return next((content for content in allowed if _stands_alone(content, contents)), None)


def alike(step: PreTokenizer | None) -> bool:
    """Return whether a pre-tokenizer treats every stretch between added tokens alike."""
    if step is None:
        return True
    if step.type == "Metaspace":
        # The scheme "first" adds a space only at the beginning of the whole text.
        return step.prepend_scheme in ("always", "never")
    return step.type in _INDEPENDENT and all(map(alike, step.pretokenizers))


def _stands_alone(content: str, contents: Sequence[str]) -> bool:
    """Return whether every occurrence of `content` in any text is matched as this token: no other token or
    occurrence can overlap it."""
    # An adjacent token with strip would remove white space from it.
    if any(char.isspace() for char in content):
        return False
    return not any(_may_overlap(content, other) for other in contents)


def _may_overlap(one: str, other: str) -> bool:
    if one != other and (one in other or other in one):
        return True
    shorter = min(len(one), len(other))
    return any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in range(1, shorter))


@dataclass(slots=True)
class PrefixCounts:
    """Size and use of the cache. `found` and `missed` count characters of texts that could be cut."""

    entries: int = 0
    bytes: int = 0
    found: int = 0
    missed: int = 0
    evicted: int = 0


class _Entry:
    """A segment and its tokens. `follower` is the segment that followed it last time: comparing text is many
    times cheaper than searching for the marker and hashing the text before it."""

    __slots__ = ("follower", "ids", "text")

    def __init__(self, text: str, ids: bytes) -> None:
        self.text = text
        self.ids = ids
        self.follower: _Entry | None = None

    def drop(self) -> None:
        """Clear the entry, even if it is still referenced."""
        self.text, self.ids, self.follower = "", b"", None


@dataclass(slots=True)
class Pieces:
    """One text, cut into segments. `known[i]` are the tokens of `texts[i]` as native uint32 bytes, None if
    they must be computed."""

    texts: list[str]
    known: list[bytes | None]
    salt: str

    def missing(self) -> list[str]:
        """Return the texts without tokens, in order."""
        return [text for text, known in zip(self.texts, self.known, strict=True) if known is None]


class PrefixTokens:
    """LRU cache of tokens by salt and segment. Thread-safe; `limit` is in bytes."""

    def __init__(self, marker: str, limit: int) -> None:
        self._marker = marker
        self._limit = limit
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._counts = PrefixCounts()

    def counts(self) -> PrefixCounts:
        """Return a copy of the statistics."""
        with self._lock:
            counts = self._counts
            return PrefixCounts(len(self._entries), counts.bytes, counts.found, counts.missed, counts.evicted)

    def cut(self, text: str, salt: str) -> Pieces:
        """Return `text` in segments, with the cached tokens."""
        texts: list[str] = []
        known: list[bytes | None] = []
        start = found = 0
        before: _Entry | None = None
        with self._lock:
            while True:
                segment, entry = self._next(text, start, before, salt)
                if segment is None:
                    break
                texts.append(segment)
                start += len(segment)
                if entry is None:
                    known.append(None)
                else:
                    found += len(segment)
                    known.append(entry.ids)
                    if before is not None:
                        before.follower = entry
                before = entry
            # The text after the last cut changes with the next turn. An empty rest has no tokens, but
            # a tokenizer might add a word prefix to it.
            texts.append(text[start:])
            known.append(None if texts[-1] else b"")
            self._counts.found += found
            self._counts.missed += len(text) - found
            return Pieces(texts, known, salt)

    def keep(self, pieces: Pieces, made: Sequence[bytes]) -> list[bytes]:
        """Return the tokens of all pieces in order. `made` are those of the missing ones, which are cached
        unless the cache was cleared since the cut."""
        remaining = iter(made)
        whole = [next(remaining) if known is None else known for known in pieces.known]
        if any(known is None for known in pieces.known[:-1]):
            with self._lock:
                for segment, known, ids in zip(pieces.texts[:-1], pieces.known, whole, strict=False):
                    if known is None:
                        self._put((pieces.salt, segment), ids)
        return whole

    def _next(
        self, text: str, start: int, before: _Entry | None, salt: str
    ) -> tuple[str | None, _Entry | None]:
        """Return the segment that begins at `start`, None for the last, and its cached entry."""
        follower = None if before is None else before.follower
        # A segment ends at the first marker after the minimum length, so that any text that begins with
        # a segment is cut at the same position.
        if follower is not None and follower.text and _goes_on(text, start, follower.text):
            self._entries.move_to_end((salt, follower.text))
            return follower.text, follower
        size = len(self._marker)
        at = text.find(self._marker, start + max(0, MIN_CHARS - size))
        if at < 0:
            return None, None
        key = (salt, text[start : at + size])
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return key[1], entry

    def _put(self, key: tuple[str, str], ids: bytes) -> None:
        counts, entries = self._counts, self._entries
        size = _size(key, ids)
        if size > self._limit // _LARGEST_SHARE or key in entries:
            return
        entries[key] = _Entry(key[1], ids)
        counts.bytes += size
        while counts.bytes > self._limit:
            oldest, entry = entries.popitem(last=False)
            counts.bytes -= _size(oldest, entry.ids)
            counts.evicted += 1
            entry.drop()


def _goes_on(text: str, start: int, segment: str) -> bool:
    """Return whether `segment` is in `text` at `start`."""
    # Strings of equal character width are compared by memcmp, others character by character: a slice of a
    # wide text has the smallest width that fits it.
    if text.isascii():
        return text.startswith(segment, start)
    return text[start : start + len(segment)] == segment


def _size(key: tuple[str, str], ids: bytes) -> int:
    # The salt is the caller's string; no other reference may keep it alive.
    return _ENTRY_BYTES + sys.getsizeof(key[0]) + sys.getsizeof(key[1]) + len(ids)
