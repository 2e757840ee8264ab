"""One choice's output: text, stop conditions and limits, with the meaning that vLLM gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvasir.core.requests import FinishReason, PositionLogprobs, Sampling
from kvasir_workers.engines.sim.model import Context, SimModel, logprobs, sample
from kvasir_workers.engines.sim.speech import Speech

_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one step added to a choice. `offset` is the index of `token` in the choice's output."""

    offset: int
    token: int
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish: FinishReason | None
    stop_reason: str | None


def output_text(
    model: SimModel, sampling: Sampling, tokens: Iterable[int], speech: Speech | None = None
) -> str:
    """How `tokens` of output read."""
    return "".join(_piece(model, sampling, token, speech) for token in tokens)


def _piece(model: SimModel, sampling: Sampling, token: int, speech: Speech | None) -> str:
    if speech is not None and token in speech.marks:
        return speech.marks[token]
    if token == model.eos_token_id and sampling.skip_special_tokens:
        return ""
    return model.text(token)


class SimOutput:
    """Grows a choice token by token.

    `limit` is the number of tokens after which it ends with LENGTH. Text that may be the beginning of
    a stop string is held back until that is known. `tokens` counts all of the choice, `resumed` those
    that another worker generated. `speech` says what comes where, for a request that wants parsing.
    """

    def __init__(self, model: SimModel, sampling: Sampling, limit: int, speech: Speech | None = None) -> None:
        self.tokens = 0
        self.resumed = 0
        self._model = model
        self._sampling = sampling
        self._limit = limit
        self._speech = speech
        self._marks = _NOTHING if speech is None else frozenset(speech.marks)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.add(model.eos_token_id)
        self._stop_ids = frozenset(stops)
        longest = max((len(stop) for stop in sampling.stop), default=0)
        self._hold_back = max(0, longest - 1) if not sampling.include_stop_str_in_output else 0
        self._held = ""
        # The end of what was sent or held, in which a stop string may have begun.
        self._tail = ""
        self._tail_length = max(0, longest - 1)

    @property
    def generated(self) -> int:
        """Tokens of this choice that were generated here."""
        return self.tokens - self.resumed

    def resume(self, tokens: Sequence[int], text_length: int) -> None:
        """Begin as if `tokens` had been generated here and `text_length` characters of them been sent."""
        text = output_text(self._model, self._sampling, tokens, self._speech)
        self.tokens = self.resumed = len(tokens)
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        self._held = text[text_length:]

    def grow(self, context: Context) -> Emitted:
        """Sample the next token and apply the stop conditions. The caller appends it to `context`."""
        early = self.tokens < self._sampling.min_tokens
        token = None if self._speech is None else self._speech.token(self.tokens)
        if token is None:
            banned = self._marks | self._stop_ids if early else self._marks
            token = sample(self._model, context, self._sampling, banned)
        wanted = self._sampling.logprobs
        position = () if wanted is None else (logprobs(self._model, context, token, wanted),)
        offset = self.tokens
        self.tokens += 1
        finish, stop_reason, text = self._judge(token)
        return Emitted(offset, token, text, position, finish, stop_reason)

    def flush(self) -> str:
        """What is still held back, when the choice ends for a reason from outside."""
        held, self._held = self._held, ""
        return held

    def _judge(self, token: int) -> tuple[FinishReason | None, str | None, str]:
        """Whether the choice ends with `token`, the stop reason, and the text to send."""
        may_stop = self.tokens > self._sampling.min_tokens
        if may_stop and token in self._stop_ids:
            is_eos = token == self._model.eos_token_id
            last = self._piece(token) if self._sampling.include_stop_str_in_output else ""
            return FinishReason.STOP, None if is_eos else str(token), self.flush() + last
        piece = self._piece(token)
        if may_stop and (found := self._find_stop(piece)) is not None:
            stop, sent_end = found
            return FinishReason.STOP, stop, self._cut(piece, sent_end)
        self._tail = (self._tail + piece)[-self._tail_length :] if self._tail_length else ""
        pending = self._held + piece
        if self.tokens >= self._limit:
            self._held = ""
            return FinishReason.LENGTH, None, pending
        keep = min(self._hold_back, len(pending))
        self._held = pending[len(pending) - keep :]
        return None, None, pending[: len(pending) - keep]

    def _piece(self, token: int) -> str:
        return _piece(self._model, self._sampling, token, self._speech)

    def _find_stop(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first in tail + piece, and where the text to show ends there."""
        window = self._tail + piece
        hits = [
            (at + len(stop), at, stop)
            for stop in self._sampling.stop
            if (at := window.find(stop, max(0, len(self._tail) - len(stop) + 1))) >= 0
        ]
        if not hits:
            return None
        end, begin, stop = min(hits)
        return stop, end if self._sampling.include_stop_str_in_output else begin

    def _cut(self, piece: str, shown_end: int) -> str:
        """The unsent text up to `shown_end`, a position in tail + piece."""
        window = self._tail + piece
        unsent = self._held + piece
        self._held = ""
        return unsent[: max(0, len(unsent) - (len(window) - shown_end))]
