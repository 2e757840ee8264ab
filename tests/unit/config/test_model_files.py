"""Model folders are found or refused with a reason, and their tokenizers are distinguished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.config.load.model_files import (
    chat_template,
    configured_template,
    resolve_model,
    tokenizer_digest,
)
from kvasir.core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A"}))
    return tmp_path


def test_the_shipped_model_is_found_by_its_name() -> None:
    assert (resolve_model("kvasir-tiny") / "config.json").is_file()


def test_a_folder_is_its_own_model(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("source", ["no-such-model", "/no/such/folder", "./here", "a/b/c"])
def test_what_is_no_model_is_refused_with_what_would_be_one(source: str) -> None:
    with pytest.raises(ConfigError, match="kvasir-tiny"):
        resolve_model(source)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_the_digest_follows_tokenizer_and_template(folder: Path) -> None:
    first = tokenizer_digest(folder)
    assert tokenizer_digest(folder) == first
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "B"}))
    second = tokenizer_digest(folder)
    (folder / "tokenizer.json").write_text('{"model": 2}')
    assert len({first, second, tokenizer_digest(folder)}) == 3


def test_the_digest_follows_a_configured_template(folder: Path) -> None:
    assert tokenizer_digest(folder, "A") == tokenizer_digest(folder)
    assert tokenizer_digest(folder, "B") != tokenizer_digest(folder)


def test_a_configured_template_is_jinja_or_a_file_with_it(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert configured_template(None) is None
    assert configured_template("{{ messages[0].content }}") == "{{ messages[0].content }}"
    assert configured_template(str(file)) == "{{ messages }}"
    file.write_text(" ")
    for wrong in (str(file), str(tmp_path), "no such file"):
        with pytest.raises(ConfigError, match=r"^model\.chat_template: "):
            configured_template(wrong)


def test_a_template_file_wins_over_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("J")
    assert chat_template(folder) == "J"


def test_a_template_file_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: cannot be read: not UTF-8"):
        chat_template(folder)


def test_the_default_one_of_named_templates_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template(folder) == "D"


def test_a_model_without_a_fast_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tokenizer_digest(folder)
