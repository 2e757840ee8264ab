"""Text on which `kvasir verify --quality` measures accuracy: a user's file, or texts that ship with Kvasir.

Those, in held_out.jsonl, were written for this purpose and may be used without restriction (CC0 1.0). They
are prose, dialogue, code, data and arithmetic in four languages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvasir.core.errors import ConfigError

FILE_BYTES = 16 << 20
PIECE_CHARACTERS = 8_192
"""Longer texts are tokenized in pieces, so that no request of it is large."""
WINDOW_TOKENS = 512
_LEAST_TOKENS = 2
BUILT_IN = "the texts that ship with Kvasir"


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """Texts, and where they are from."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens that are scored in one request. The first `opening` are the model's special tokens,
    which have no score, nor has the first token of all."""

    tokens: tuple[int, ...]
    opening: int = 0

    @property
    def first(self) -> int:
        """The index of the first token that has a score."""
        return max(1, self.opening)


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a set; `left_out` says whether text remained beyond the wanted number of tokens."""

    windows: tuple[Window, ...]
    left_out: bool


def read_held_out(path: Path | None) -> HeldOutSet:
    """Read `path`: a file *.jsonl has one JSON object with the string `text` on each line, any other is one
    text. None: the texts that ship with Kvasir. Raises ConfigError that names the file and the line."""
    if path is None:
        name, data = BUILT_IN, resources.files(__package__).joinpath("held_out.jsonl").read_bytes()
        return HeldOutSet(name, tuple(_lines(data.decode(), name)))
    where = f"--quality-set {path}"
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 at byte {error.start}") from error
    if len(data) > FILE_BYTES:
        raise ConfigError(f"{where}: larger than {FILE_BYTES >> 20} MiB; name a part of it")
    texts = tuple(_lines(text, where)) if path.suffix == ".jsonl" else (text,)
    if not any(each.strip() for each in texts):
        raise ConfigError(f"{where}: no text in it")
    return HeldOutSet(path.name, texts)


def _lines(data: str, where: str) -> Iterator[str]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: line {number} is no JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise ConfigError(f'{where}: line {number} is not of the form {{"text": "…"}}')
        yield value["text"]


def windows_of(
    found: HeldOutSet, tokenize: Callable[[str, bool], list[int]], most: int, context: int
) -> Windows:
    """Cut the set into windows of at most `most` tokens together, that fit a context of `context` tokens with
    one token of output. `tokenize(text, special)` returns tokens, with the model's special tokens or without.
    Each window begins with the special tokens that a prompt of the model begins with."""
    opening = _opening(tokenize)
    size = min(WINDOW_TOKENS, context - 1 - len(opening))
    made: list[Window] = []
    room = most
    for piece in _pieces(found):
        tokens = tokenize(piece, False)
        for at in range(0, len(tokens), size):
            part = tokens[at : at + min(size, room)]
            if len(part) >= _LEAST_TOKENS:
                made.append(Window((*opening, *part), len(opening)))
                room -= len(part)
            if room < _LEAST_TOKENS:
                return Windows(tuple(made), left_out=True)
    return Windows(tuple(made), left_out=False)


def _opening(tokenize: Callable[[str, bool], list[int]]) -> tuple[int, ...]:
    """Return the special tokens before a prompt."""
    with_special, plain = tokenize("text", True), tokenize("text", False)
    before = len(with_special) - len(plain)
    return tuple(with_special[:before]) if before > 0 and with_special[before:] == plain else ()


def _pieces(found: HeldOutSet) -> Iterator[str]:
    """Yield the texts, long ones in pieces that end with a line where there is one."""
    for text in found.texts:
        at = 0
        while at < len(text):
            end = at + PIECE_CHARACTERS
            if end < len(text):
                line = text.rfind("\n", at, end)
                end = line + 1 if line >= at else end
            yield text[at:end]
            at = end
