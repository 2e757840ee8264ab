"""Sources that are near to a model and are none: what they are, and what to set instead.

A first attempt often names an adapter, a file, the folder above the model, the Hub's cache or an address of
the Hub's site. "No config.json" is true of all of them and helps with none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from kvasir.checkpoint.json_file import read_json_object
from kvasir.core.errors import ConfigError

MOST_NAMES = 1000
"""Names of a folder that are looked at: a folder with more is no model."""

_WHOLE = "name the folder or repository that has config.json, tokenizer.json and safetensors files"
_CACHE = re.compile(r"models--([^/]+?)--([^/]+)")
_ID = r"([\w.-]+/[\w.-]+)"
_SITE = re.compile(rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/{_ID}(?:/.*)?|hf://{_ID}")
_REVISED = re.compile(rf"{_ID}[@:]([\w./-]+)")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files of which one is enough, as patterns, and what a folder with it and without config.json is."""

    files: tuple[str, ...]
    what: str
    remedy: str


_KINDS = (
    _Kind(
        ("adapter_config.json",),
        "is a LoRA adapter and no model",
        "set model.source to the model that it was trained for, and name the adapter in `lora`",
    ),
    _Kind(("*.gguf",), "has weights in GGUF, and Kvasir reads safetensors only", _WHOLE),
    _Kind(("model_index.json",), "is a pipeline of diffusers, without text", "choose another model"),
    _Kind(
        ("params.json", "*.pth"),
        "has a model in the format of its authors, without config.json",
        "download it in Hugging Face's format: config.json, tokenizer.json and model*.safetensors",
    ),
    _Kind(
        ("*.safetensors", "*.bin", "*.pt", "tokenizer.json"),
        "has files of a model, and no config.json",
        "download the whole model again",
    ),
)  # fmt: skip


def other_kind(names: Collection[str]) -> tuple[str, str] | None:
    """Return what a folder or repository with files of these names, and without config.json, is, and what to
    do; None if nothing is known of it."""
    for kind in _KINDS:
        if any(fnmatch(name, pattern) for name in names for pattern in kind.files):
            return kind.what, kind.remedy
    return None


def folder_problem(folder: Path) -> str:
    """Return why `folder`, which has no config.json, is no model, and after a semicolon what to do."""
    names = sorted(path.name for path in islice(folder.iterdir(), MOST_NAMES))
    if not names:
        return "is empty; download the model into it"
    if cached := _in_cache(folder):
        return cached
    if found := other_kind(names):
        what, remedy = found
        base = _adapted_model(folder) if "adapter_config.json" in names else ""
        return f"{what}; {remedy.replace('the model that it was trained for', base) if base else remedy}"
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    if inner:
        more = f" (or {', '.join(inner[1:4])})" if inner[1:] else ""
        return f"has models in folders of its own; set model.source to {folder / inner[0]}{more}"
    return "holds no config.json, so it is no model folder; name the folder that has it"


def no_folder_problem(source: str) -> str | None:
    """Return why `source`, which is no folder, is no model, and after a semicolon what to do. None if it may
    be a Hugging Face id."""
    if site := _SITE.fullmatch(source):
        return f"is an address; set model.source to {site[1] or site[2]}"
    if revised := _REVISED.fullmatch(source):
        return f"names a revision; set model.source to {revised[1]} and model.revision to {revised[2]}"
    path = Path(source).expanduser()
    if path.is_file():
        return _file_problem(path)
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        near = difflib.get_close_matches(path.name, _folders(path.parent), n=1)
        there = f"the nearest is {path.parent / near[0]}; " if near else ""
        return (
            f"is not a folder; {there}name a folder in Hugging Face form, an id such as `owner/model`, "
            "`s3://bucket/folder`, or `kvasir-tiny`"
        )
    return None


def _file_problem(path: Path) -> str:
    if path.suffix == ".gguf":
        return f"is a file in GGUF, and Kvasir reads safetensors only; {_WHOLE}"
    if (path.parent / "config.json").is_file():
        return f"is a file; set model.source to its folder, {path.parent}"
    return f"is a file; {_WHOLE}"


def _in_cache(folder: Path) -> str:
    """Return what to do with a model's folder in the Hub's cache, whose files are below snapshots/; "" for
    another folder."""
    for at in (folder, folder.parent):
        if named := _CACHE.fullmatch(at.name):
            return f"belongs to the Hugging Face cache; set model.source to {named[1]}/{named[2]}"
    return ""


def _adapted_model(folder: Path) -> str:
    try:
        base = read_json_object(folder / "adapter_config.json").get("base_model_name_or_path")
    except ConfigError:
        return ""
    return base if isinstance(base, str) else ""


def _folders(parent: Path) -> list[str]:
    try:
        return sorted(path.name for path in islice(parent.iterdir(), MOST_NAMES) if path.is_dir())
    except OSError:
        return []
