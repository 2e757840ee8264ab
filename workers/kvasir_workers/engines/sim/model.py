"""The simulated model: which token follows a context, and each token's text.

The next token is a hash of the whole context, so that a request gets the same tokens on every worker, in
every batch, whether prefilled locally or by another worker, and when it is continued from prompt + output. A
platform that loses, repeats or reorders a token therefore returns visibly different output.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass

from kvasir.core.requests import PositionLogprobs, Sampling, TokenLogprob

_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]


@dataclass(frozen=True, slots=True)
class SimModel:
    """The shape of the simulated model; the defaults are those of kvasir-tiny.

    `element_bytes` is the size of one KV element at the engine's own KV dtype, `kv_layout` the name of its
    order in memory.
    """

    vocab_size: int = 4096
    eos_token_id: int = 1
    layers: int = 4
    kv_heads: int = 4
    head_size: int = 32
    element_bytes: int = 2
    kv_layout: str = "sim"

    def bytes_per_token(self, *, fp8: bool) -> int:
        """Return the KV bytes of one token, keys and values of all layers."""
        element = 1 if fp8 else self.element_bytes
        return 2 * self.layers * self.kv_heads * self.head_size * element

    def text(self, token: int) -> str:
        """Return a token's text: a distinct word, with a leading space."""
        if token == self.eos_token_id:
            return "<eos>"
        word = ""
        while True:
            token, low = divmod(token, len(_SYLLABLES))
            word = _SYLLABLES[low] + word
            if token == 0:
                return " " + word


class Context:
    """A running digest of everything before the next token.

    Greedy requests depend only on the engine's seed and the adapter; sampled ones also on the request's seed
    and the choice.
    """

    __slots__ = ("_digest",)

    def __init__(self, seed: int, adapter: str | None, sampling: Sampling, index: int) -> None:
        drawn = "" if sampling.temperature == 0 else f"{sampling.seed}/{index}"
        self._digest = hashlib.blake2b(f"{seed}/{adapter or ''}/{drawn}".encode(), digest_size=16)

    def see(self, digest: bytes) -> None:
        """Append an image, a video or audio of the prompt, before its tokens."""
        self._digest.update(digest)

    def extend(self, tokens: array[int]) -> None:
        """Append many tokens."""
        self._digest.update(tokens.tobytes())

    def append(self, token: int) -> None:
        """Append one token."""
        self._digest.update(token.to_bytes(4, sys.byteorder))

    def draw(self) -> tuple[int, int]:
        """Return two independent 64-bit numbers that depend on the whole context."""
        digest = self._digest.digest()
        return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def sample(model: SimModel, context: Context, sampling: Sampling, banned: frozenset[int]) -> int:
    """Return the next token. `banned` tokens are chosen only if no other is left.

    Of the sampling parameters, only `logit_bias` at ±100 (force and ban) has an effect: there is no
    distribution for top_p, top_k, min_p or penalties.
    """
    barred = banned
    if sampling.logit_bias:
        for token, bias in sampling.logit_bias:
            if bias >= 100 and token not in banned:
                return token
        barred = banned | {token for token, bias in sampling.logit_bias if bias <= -100}
    start = context.draw()[0]
    for step in range(model.vocab_size):
        token = (start + step) % model.vocab_size
        if token not in barred:
            return token
    return start % model.vocab_size


def logprobs(model: SimModel, context: Context, token: int, top: int) -> PositionLogprobs:
    """Return log-probabilities at the position that `context` precedes, as the head of a proper distribution:
    the sampled token is the likeliest, and each of the `top` alternatives has half of the rest."""
    chance = context.draw()[1]
    sampled = _candidate(model, token, -0.05 - (chance % 600) / 1000)
    rest = -1.0 - (chance % 500) / 1000
    alternatives = [
        _candidate(model, (token + step) % model.vocab_size, rest - step)
        for step in range(1, min(top, model.vocab_size))
    ]
    return PositionLogprobs(sampled=sampled, top=(sampled, *alternatives)[:top])


def _candidate(model: SimModel, token: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(token_id=token, token=model.text(token), logprob=logprob)
