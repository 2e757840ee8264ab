"""Prompts of a requested number of tokens, made without the model's tokenizer.

A prompt consists of common English words, most of which are one token in any vocabulary. How many tokens a
word and the rest of a request take is measured with the server's own counts: it is told in `usage` how long
two prompts of known words were. Blocks with equal names get equal words, so that prompts share what the
workload says they share, to within a block. Texts differ from run to run by a salt, or a server's cache would
still hold those of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvasir_platform.workload.requests import WorkloadRequest, block_name, named_under

_LEXICON = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if will up "
    "other about out many then them these so some her would make like him into time has look two more write "
    "go see number no way could people my than first water been call who its now find long down day did get "
    "come made may part over new sound take only little work know place year live me back give most very "
    "after thing our just name good sentence man think say great where help through much before line right "
    "too mean old any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even such because turn here why ask went men read need land different home "
    "us move try kind hand picture again change off play spell air away animal house point page letter "
    "mother answer found study still learn should world"
)
_WORDS: tuple[str, ...] = tuple(_LEXICON.split())
_BITS = 16
"""Of a 64-bit number, four words are drawn."""


@dataclass(frozen=True, slots=True)
class TokenScale:
    """How words become tokens: `per_word` each, and `fixed` for the rest of a request (template, special
    tokens)."""

    per_word: float = 1.0
    fixed: float = 0.0

    def words(self, tokens: int) -> int:
        """Words of a text of that many tokens, without the rest of a request."""
        return round(tokens / self.per_word)


def fitted(samples: Sequence[tuple[int, int]]) -> TokenScale:
    """The scale of (words, tokens) of prompts of at least two lengths: a line through the shortest and the
    longest. Raises ValueError if longer prompts do not have more tokens."""
    (few, least), (many, most) = min(samples), max(samples)
    if many <= few or most <= least:
        raise ValueError(f"{few} words are {least} tokens, and {many} words are {most}")
    per_word = (most - least) / (many - few)
    return TokenScale(per_word, max(0.0, least - few * per_word))


class PromptMaker:
    """Makes prompts. `salt` distinguishes runs."""

    def __init__(self, scale: TokenScale, block_tokens: int, salt: int) -> None:
        self._scale = scale
        self._block = block_tokens
        self._salt = salt
        self._made = 0
        # Texts of blocks that several prompts share: the longest prompts have some ten thousand.
        self._text = lru_cache(maxsize=65_536)(self._block_text)

    def renew(self, salt: int) -> None:
        """Make other texts from here on."""
        self._salt = salt
        self._text.cache_clear()

    def prompt(self, request: WorkloadRequest) -> str:
        """The prompt of a request, which has at least one word."""
        self._made += 1
        # What is fixed comes off the end, where prompts share nothing.
        length = max(1, self._scale.words(max(0, request.prompt_tokens - round(self._scale.fixed))))
        shared = "".join(self._text(name, place) for place, name in enumerate(request.names))
        parts = shared.split(" ")[1 : length + 1]
        alone = named_under(self._salt, self._made)
        if len(parts) < length:
            parts += _words(alone, length - len(parts))
        return " ".join(parts)

    def _block_text(self, name: int, place: int) -> str:
        # Rounded by place, so that errors of many blocks do not add up.
        words = self._scale.words((place + 1) * self._block) - self._scale.words(place * self._block)
        return "".join(f" {word}" for word in _words(named_under(self._salt, name), words))


def probe_text(words: int, salt: int) -> str:
    """A prompt of that many words, which no other salt has."""
    return " ".join(_words(block_name(salt), words))


def _words(seed: int, count: int) -> list[str]:
    """Words drawn from a seed."""
    found: list[str] = []
    state = seed
    while len(found) < count:
        state = block_name(state)
        for shift in range(0, 64, _BITS):
            found.append(_WORDS[(state >> shift & 0xFFFF) * len(_WORDS) >> _BITS])
    return found[:count]
