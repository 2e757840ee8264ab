"""Accuracy of a running deployment on held-out text, alone and against a baseline: `kvasir verify --quality`.

Each window of the text is one request with log-probabilities of its prompt. The gateway runs such a request
whole on one worker and without its prefix cache, so that the figures are of weights and kernels, and not of
what moved between workers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.verify.arguments import QUALITY_TOKENS
from kvasir_platform.cli.verify.client import VerifyClient
from kvasir_platform.cli.verify.held_out import HeldOutSet, Window, Windows, windows_of
from kvasir_platform.cli.verify.limits import QualityLimits
from kvasir_platform.cli.verify.score_file import ScoredSet
from kvasir_platform.cli.verify.scores import QualityFigures, ScoredToken, compare, perplexity

STREAMS = 4
"""Requests at a time."""

Scores = tuple[tuple[ScoredToken, ...], ...]
Tokenize = Callable[[str, bool], list[int]]


class QualityBaseline(Protocol):
    """What a deployment is compared with."""

    name: str

    def scores(self, windows: tuple[Window, ...], cut: Callable[[Tokenize], Windows]) -> Scores:
        """Return the scores of the windows' tokens; `cut` makes windows of the same text with another
        tokenizer. Raises ConfigError if the baseline has no scores of these tokens, and UpstreamError if it
        does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """The text to measure, at most `tokens` tokens of it, the baseline, if any, and what passes."""

    held_out: HeldOutSet = field(repr=False)
    tokens: int = QUALITY_TOKENS
    baseline: QualityBaseline | None = None
    limits: QualityLimits = field(default_factory=QualityLimits)


class LiveBaseline:
    """A model that is served: of another deployment, or of the same one."""

    def __init__(self, client: VerifyClient, name: str) -> None:
        self.name = name
        self._client = client

    def scores(self, windows: tuple[Window, ...], cut: Callable[[Tokenize], Windows]) -> Scores:
        """Ask for them, unless its tokenizer is another."""
        if cut(self._client.tokens).windows != windows:
            raise ConfigError(
                f"--quality-baseline: {self.name} has another tokenizer; its predictions cannot be compared"
            )
        return score(self._client, windows)


class SavedBaseline:
    """Scores that an earlier run wrote."""

    def __init__(self, saved: ScoredSet) -> None:
        self.name = saved.name
        self._saved = saved

    def scores(self, windows: tuple[Window, ...], cut: Callable[[Tokenize], Windows]) -> Scores:
        """Return them, if they are of these tokens."""
        if windows != self._saved.windows:
            raise ConfigError(
                f"--quality-baseline: the scores of {self.name} are of other tokens. Measure both with the "
                "same --quality-set and --quality-tokens; models with different tokenizers cannot be compared"
            )
        return self._saved.scored


def score(client: VerifyClient, windows: tuple[Window, ...]) -> Scores:
    """Return the scores of the windows' tokens, by a few requests at a time. Raises UpstreamError."""
    with ThreadPoolExecutor(STREAMS) as threads:
        return tuple(threads.map(lambda window: client.score(window.tokens, window.first), windows))


def measure_quality(
    client: VerifyClient, name: str, options: QualityOptions, context: int, say: Callable[[str], None]
) -> tuple[QualityFigures, ScoredSet]:
    """Measure the model `name` with a context of `context` tokens. Return figures, and the scores to keep.
    Raises ConfigError and UpstreamError as above."""
    held_out, baseline = options.held_out, options.baseline

    def cut(tokenize: Tokenize) -> Windows:
        return windows_of(held_out, tokenize, options.tokens, context)

    made = cut(client.tokens)
    if not made.windows:
        raise ConfigError(f"--quality-set: {held_out.name} has no two tokens for this model")
    total = sum(len(each.tokens) - each.first for each in made.windows)
    reference: Scores = ()
    if baseline is not None:
        say(f"{total:,} tokens of {held_out.name}, scored by {baseline.name}")
        reference = baseline.scores(made.windows, cut)
    say(f"{total:,} tokens of {held_out.name}, scored by {name}")
    found = ScoredSet(name, made.windows, score(client, made.windows))
    flat = list(chain.from_iterable(found.scored))
    compared = None
    if baseline is not None:
        compared = compare(baseline.name, list(chain.from_iterable(reference)), flat)
    return QualityFigures(held_out.name, total, made.left_out, perplexity(flat), compared), found
