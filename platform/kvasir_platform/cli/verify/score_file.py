"""Scores of held-out text as a file, which a later `kvasir verify` takes as its baseline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.verify.held_out import Window
from kvasir_platform.cli.verify.scores import ScoredToken
from kvasir_platform.reports.files import read_json

SUFFIX = ".quality.json"
_FORMAT = "kvasir-quality-1"
_FILE_BYTES = 512 << 20
_DIGITS = 7


@dataclass(frozen=True, slots=True)
class ScoredSet:
    """The scores of the windows' tokens, in order, and whose they are."""

    name: str
    windows: tuple[Window, ...]
    scored: tuple[tuple[ScoredToken, ...], ...]


def write_scores(found: ScoredSet, path: Path) -> None:
    """Write them. Raises OSError."""
    windows = [
        {
            "tokens": window.tokens,
            "opening": window.opening,
            "logprobs": [round(each.logprob, _DIGITS) for each in scores],
            "likely": [
                {str(token): round(value, _DIGITS) for token, value in each.likely.items()} for each in scores
            ],
        }
        for window, scores in zip(found.windows, found.scored, strict=True)
    ]
    shown = {"format": _FORMAT, "name": found.name, "windows": windows}
    path.write_text(json.dumps(shown, separators=(",", ":")) + "\n", encoding="utf-8")


def read_scores(path: Path) -> ScoredSet:
    """Read what `write_scores` wrote. Raises ConfigError that says what is wrong with the file."""
    where = f"--quality-baseline {path}"
    value = read_json(path, _FILE_BYTES, where)
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ConfigError(f"{where}: no scores; name the PREFIX{SUFFIX} that --report wrote with --quality")
    try:
        windows = [Window(tuple(each["tokens"]), each["opening"]) for each in value["windows"]]
        scored = [_scores(each) for each in value["windows"]]
        for window, scores in zip(windows, scored, strict=True):
            if len(window.tokens) - window.first != len(scores):
                raise ValueError(f"{len(scores)} scores for {len(window.tokens)} tokens")
        return ScoredSet(str(value["name"]), tuple(windows), tuple(scored))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: damaged: {error}") from error


def _scores(window: dict[str, Any]) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(float(logprob), {int(token): float(each) for token, each in likely.items()})
        for logprob, likely in zip(window["logprobs"], window["likely"], strict=True)
    )
