"""Completes constrained output before `max_tokens` cuts it off.

A schema may allow strings, numbers and arrays of any length, and a model may fill them until its limit: what
the client then has is JSON that no parser reads. Near the limit the mask of the next token is therefore
reduced to the first token of a short text that completes the output. In a string the model goes on for as
long as the rest fits; elsewhere it begins nothing that might not.

That text is searched with the grammar itself, one token at a time, and undone again. The search prefers what
closes JSON and is not exhaustive, so some outputs of other grammars are cut off all the same. Whether and how
the mask is reduced follows from the output so far and the tokens that remain, so that another worker which
continues the output decides alike.

Nothing of vLLM is imported: a grammar is anything with the methods of vLLM's StructuredOutputGrammar, a mask
anything with rows of 32-bit words that numpy reads.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SHORTENED: Final = "max_tokens"
"""`stop_reason` of a request whose output was completed early for its limit."""
WINDOW: Final = 512
"""Remaining tokens from which on completions are searched. It bounds their length."""
SEARCH_S: Final = 0.008
"""Processor time of the searches of one step, in seconds: less than grammar_budget.STEP_S, which a step that
searches must not exceed either. A grammar whose completion takes longer is not completed."""
FRUITLESS_S: Final = 0.04
"""Processor time of all searches of one output that found nothing, in seconds. After it none is made."""

_ROOM = 32
"""Tokens beyond the completion that are kept free outside of strings, where one token may begin an object
that takes many."""
_ROOM_IN_TEXT = 8
_SAID = 32
"""Number of last tokens that the search looks back to."""
_FEW = 64
"""Maximum number of allowed tokens of which the longest is searched."""
_CLOSING = '}]":,'
_OTHERS = "@:.-/" + string.digits + string.ascii_letters + "_ "
_CONTENT = "x"
"""A character that JSON has in strings only, except in keys and values that a schema prescribes."""
_MARKS = '""</parameter></arg_value>'
"""What ends text in calls that models write as XML (xgrammar's `qwen_xml` and `glm_xml`), after two quotes:
one ends a JSON string."""
_BLANK = " \n\r\tĠĊĉč▁"

Words = NDArray[np.uint32]


class ClosingVocabulary:
    """The tokens of `tokenizer` with which outputs are completed. Without those of JSON, which is possible
    with unusual tokenizers, fewer outputs are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = {}
        self._ranks: dict[int, tuple[bool, int]] = {}
        for char in {*_CLOSING, *_OTHERS, *_MARKS}:
            token = tokenizer.convert_tokens_to_ids(char)
            if isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == char:
                self._ids[char] = token
        marks = [self._ids.get(char) for char in _MARKS]
        self._marks = [] if None in marks else marks

    def in_text(self, words: Words) -> bool:
        """Whether the mask is that of a string's content, or of free text."""
        return all(self._allowed(words, char) is not None for char in '"}]')

    def closing(self, words: Words, said: Sequence[int]) -> int | None:
        """Return the allowed token that is likely to lead to the end the soonest, None if none is known.
        `said` are those before it: repeating the last may not lead anywhere."""
        if self.in_text(words) and (found := self._mark_after(said)) is not None:
            return found
        last = said[-1] if said else None
        for char in '"' if self._allowed(words, _CONTENT) is not None else _CLOSING:
            if (found := self._allowed(words, char)) is not None:
                return found
        if (found := self._allowed(words, "0")) not in (None, last):
            return found
        if (found := self._longest_of_few(words)) is not None:
            return found
        others = [found for char in _OTHERS if (found := self._allowed(words, char)) is not None]
        return next((each for each in others if each != last), others[0] if others else None)

    def _mark_after(self, said: Sequence[int]) -> int | None:
        """Return the next token of the marks, once two quotes have not ended a text."""
        for begun in range(len(self._marks) - 1, 1, -1):
            if list(said[-begun:]) == self._marks[:begun]:
                return self._marks[begun]
        return None

    def _allowed(self, words: Words, char: str) -> int | None:
        found = self._ids.get(char)
        return found if found is not None and allows(words, found) else None

    def _longest_of_few(self, words: Words) -> int | None:
        # As truth values first: numpy finds those three times as fast.
        at = np.flatnonzero(words != 0)
        if at.size > _FEW:
            return None
        few = [
            word * 32 + bit
            for word, bits in zip(at.tolist(), words[at].tolist(), strict=True)
            for bit in range(bits.bit_length())
            if bits >> bit & 1
        ]
        return None if len(few) > _FEW else max(few, key=self._rank, default=None)

    def _rank(self, token: int) -> tuple[bool, int]:
        """Return whether it is more than white space, and its length."""
        rank = self._ranks.get(token)
        if rank is None:
            text = self._tokenizer.convert_ids_to_tokens(token) or ""
            rank = self._ranks[token] = bool(text.strip(_BLANK)), len(text)
        return rank


class ClosingGrammar:
    """A grammar that is completed within `limit` tokens of output; the rest is passed to `grammar`.

    `produced` returns how many tokens of output there are, grammar or not. `stops` are the tokens that end
    the output, the preferred one first. `allocate` returns a mask of one row. `cpu_s` reads the processor
    time of the calling thread. `shortened` is called whenever the mask was reduced.
    """

    def __init__(
        self,
        grammar: Any,
        vocabulary: ClosingVocabulary,
        *,
        limit: int,
        produced: Callable[[], int],
        stops: Sequence[int],
        allocate: Callable[[], Any],
        cpu_s: Callable[[], float],
        shortened: Callable[[], None],
    ) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._limit = limit
        self._produced = produced
        self._stops = stops
        self._allocate = allocate
        self._cpu_s = cpu_s
        self._shortened = shortened
        self._accepted: list[int] = []
        self._end: int | None = None
        """The number of accepted tokens at which the output is cut off; None: not known yet."""
        self._completion: list[int] = []
        self._searches = True
        self._fruitless_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar."""
        accepted = bool(self._grammar.accept_tokens(request_id, tokens))
        if accepted:
            self._accepted += tokens
        return accepted

    def rollback(self, count: int) -> None:
        """See StructuredOutputGrammar."""
        self._grammar.rollback(count)
        del self._accepted[len(self._accepted) - count :]

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        """See StructuredOutputGrammar."""
        self._grammar.fill_bitmask(bitmask, index)
        if self._end is None:
            self._end = len(self._accepted) + self._limit - self._produced()
        left = self._end - len(self._accepted)
        if not self._searches or left > WINDOW:
            return
        row = bitmask[index]
        words: Words = np.asarray(row).view(np.uint32)
        if self._far(words, left):
            return
        begun = self._cpu_s()
        self._completion = self._search(words, left, begun)
        if not self._completion:
            spent_s = self._cpu_s() - begun
            self._fruitless_s += spent_s
            self._searches = spent_s <= SEARCH_S and self._fruitless_s <= FRUITLESS_S
        elif self._room(words, left, begun) >= left - len(self._completion):
            self._reduce(row, self._completion[0])

    def _far(self, words: Words, left: int) -> bool:
        """Whether the last completion that was found is one still, and much shorter than what is left."""
        known = self._completion
        near = _ROOM_IN_TEXT if self._vocabulary.in_text(words) else 2 * _ROOM
        if not known or left - len(known) <= near:
            return False
        return left > 2 * len(known) + 4 * _ROOM or self._grammar.validate_tokens(known) == known

    def _room(self, words: Words, left: int, begun: float) -> int:
        """Return the number of tokens beyond the completion at which it is begun, -1 for never."""
        end = self._end or 0
        in_text = min(_ROOM_IN_TEXT, end // 16)
        if self._vocabulary.in_text(words):
            # Text that may end here is as good when it is cut off.
            return -1 if len(self._completion) == 1 else in_text
        other = words.copy()
        other[self._completion[0] >> 5] &= ~np.uint32(1 << (self._completion[0] & 31))
        longer = self._search(other, left, begun)
        # What else may be written, such as another item of an array, has to fit as well.
        return max(min(_ROOM, end // 8), len(longer) - len(self._completion) + in_text if longer else 0)

    def _search(self, words: Words, left: int, begun: float) -> list[int]:
        """Return tokens that complete the output, with the one that ends it; empty if none were found within
        `left` tokens, and within SEARCH_S since the step's searches began."""
        mask, found, said = self._allocate(), list[int](), self._accepted[-_SAID:]
        following: Words = np.asarray(mask[0]).view(np.uint32)
        try:
            while len(found) < left:
                end = next((each for each in self._stops if allows(words, each)), None)
                if end is not None:
                    return [*found, end]
                if self._cpu_s() - begun > SEARCH_S:
                    break
                token = self._vocabulary.closing(words, said)
                if token is None or not self._grammar.accept_tokens("", [token]):
                    break
                found.append(token)
                said.append(token)
                self._grammar.fill_bitmask(mask, 0)
                words = following
        finally:
            if found:
                self._grammar.rollback(len(found))
        return []

    def _reduce(self, row: Any, token: int) -> None:
        bit = token & 31
        row[:] = 0
        row[token >> 5] = 1 << bit if bit < 31 else -(1 << 31)
        self._shortened()


def allows(words: Words, token: int) -> bool:
    """Whether a mask has `token`."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)
