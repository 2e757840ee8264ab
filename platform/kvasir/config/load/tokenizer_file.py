"""Whether tokenizer.json can be a tokenizer at all, before a router spends its start on it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvasir.checkpoint.json_file import read_json
from kvasir.core.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
_AGAIN = "download the model's tokenizer.json again"


class _Tokenizer(msgspec.Struct):
    """The part that every file of the tokenizers library has. The vocabulary is skipped."""

    model: dict[str, msgspec.Raw] = {}


def tokenizer_problem(folder: Path) -> str:
    """Return why tokenizer.json in `folder` is no tokenizer, and after a semicolon what to do. "" if it seems
    to be one, or if there is none."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return ""
    try:
        model = read_json(path, _Tokenizer).model
    except ConfigError as error:
        return error.message if "; " in error.message else f"{error.message}; {_AGAIN}"
    if "vocab" not in model:
        return f"{path} has no vocabulary, so it is no file of the tokenizers library; {_AGAIN}"
    return ""
