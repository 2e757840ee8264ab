"""Locates the files of a model, and identifies its tokenizer.

Router and workers must compute the same digest: a router that tokenizes or renders differently from its
workers sends wrong prompts without any error. Both use these functions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kvasir.checkpoint.json_file import read_json_object
from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.load.hub import cached_or_fetched
from kvasir.config.load.not_models import folder_problem, no_folder_problem
from kvasir.config.load.object_storage import is_object_uri, object_folder
from kvasir.core.errors import ConfigError

SHIPPED_MODEL = "kvasir-tiny"


def resolve_model(
    source: str, revision: str = "main", *, download: bool = True, field: str = "model.source"
) -> Path:
    """Return the folder of the model `source`: `kvasir-tiny`, a folder, a Hugging Face id, or a folder in
    object storage, of which all files but the weights are in the local folder.

    The last two are looked up in the local cache, and downloaded if they are not there and `download` is set.
    Raises ConfigError with what was not found, and where; `field` of the spec named it.
    """
    named = f"{field} {source!r}"
    if source == SHIPPED_MODEL:
        return _checked(_shipped_folder(), named)
    if is_object_uri(source):
        return _checked(object_folder(source, named, download=download), named)
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return _checked(folder.resolve(), named)
        problem = no_folder_problem(source)
    except OSError as error:
        message = f"{named} cannot be read: {error.strerror}; correct the path, or its rights"
        raise ConfigError(message) from error
    if problem is not None:
        raise ConfigError(f"{named} {problem}")
    return _checked(cached_or_fetched(source, revision, download, named), named)


def chat_template(folder: Path, *, tools: bool = False) -> str:
    """Return the chat template of a model, "" for none. Raises ConfigError for invalid JSON.

    `chat_template.jinja` takes precedence over tokenizer_config.json, and with `tools`, a template named
    `tool_use` over the default one, as in Hugging Face transformers.
    """
    named = _chat_templates(folder)
    default = named.get("default", "")
    return named.get("tool_use", default) if tools else default


def configured_template(chat_template: str | None) -> str | None:
    """Return the text of `model.chat_template`, None if it is not set. Raises ConfigError if its file cannot
    be read or is empty."""
    if chat_template is None or "{{" in chat_template or "{%" in chat_template:
        return chat_template
    try:
        text = Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"model.chat_template: {chat_template!r} is not Jinja, and cannot be read as a file: {why}; "
            "write the template itself or the path of its file"
        ) from error
    if not text.strip():
        raise ConfigError(f"model.chat_template: {chat_template} is empty; write a template into it")
    return text


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}") from error


def _chat_templates(folder: Path) -> dict[str, str]:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": _template_text(jinja)} | {path.stem: _template_text(path) for path in more}
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return {}
    try:
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") or ""
    except json.JSONDecodeError as error:
        raise ConfigError(f"{config}: not valid JSON: {error}") from error
    if isinstance(template, list):
        return {str(entry.get("name")): str(entry.get("template", "")) for entry in template}
    return {"default": str(template)}


def tokenizer_digest(folder: Path, template: str | None = None) -> str:
    """Return the SHA-256 (hex) of tokenizer.json, a zero byte, and the chat template in UTF-8: `template`, or
    by default the model's own.

    Raises ConfigError if tokenizer.json is missing, because slow tokenizers have no common file.
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save the model with a fast tokenizer")
    digest = hashlib.sha256(tokenizer.read_bytes())
    digest.update(b"\0")
    digest.update((chat_template(folder) if template is None else template).encode("utf-8"))
    return digest.hexdigest()


def returns_types(folder: Path) -> bool:
    """Return whether the tokenizer of a model returns token types, as transformers reads it: if
    tokenizer_config.json lists them, or if it lists nothing and the tokenizer is BERT's, as it is by default.
    Raises ConfigError for invalid JSON."""
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    named = config.get("model_input_names")
    if isinstance(named, list):
        return "token_type_ids" in named
    return str(config.get("tokenizer_class") or "Bert").startswith("Bert")


@dataclass(frozen=True, slots=True)
class Matryoshka:
    """A model whose embeddings can be truncated: to one of `dimensions`, or to any number if that is
    empty."""

    dimensions: tuple[int, ...] = ()


def matryoshka(folder: Path, trained: bool | None = None) -> Matryoshka | None:
    """Return how the model's embeddings can be truncated, None if they cannot: as declared in its
    config.json, read like vLLM does, unless `trained` overrides it. Raises ConfigError for invalid JSON."""
    if trained is False:
        return None
    config = read_model_config(folder).raw
    dimensions = config.get("matryoshka_dimensions") or ()
    if trained or dimensions or config.get("is_matryoshka"):
        return Matryoshka(tuple(map(int, dimensions)))
    return None


def _shipped_folder() -> Path:
    return Path(__file__).resolve().parents[4] / "models" / SHIPPED_MODEL


def _checked(folder: Path, named: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{named}: {folder} {folder_problem(folder)}")
    return folder
