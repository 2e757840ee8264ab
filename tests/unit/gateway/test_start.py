"""What a gateway reads of its models' folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvasir.checkpoint.sampling_defaults import NEUTRAL
from kvasir.config.load.loader import load, loads
from kvasir.config.load.model_files import resolve_model
from kvasir.core.errors import ConfigError
from kvasir_platform.gateway.catalog.models import EdgeModel
from kvasir_platform.gateway.start import make_models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in resolve_model("kvasir-tiny").glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def model_of(folder: Path, *overrides: str) -> EdgeModel:
    options = [f"model.source={folder}", "tokenizer.fast=never", *overrides]
    return make_models(load(None, options)).first


def test_requests_get_the_models_sampling_defaults_unless_the_spec_leaves_them_out(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert model_of(folder).defaults.temperature == 0.6
    assert model_of(folder, "model.generation_config=none").defaults == NEUTRAL


def test_a_model_without_a_configured_length_has_that_of_its_folder(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("kvasir-tiny") / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1234}))
    spec = loads(f"model: {{source: {tmp_path}, max_model_len: auto}}", "t.yaml")
    models = make_models(spec)
    assert [model.context for model in models.models] == [1234]
    models.close()


def test_a_configured_template_replaces_the_models_with_and_without_tools(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own")
    user = [{"role": "user", "content": "hi"}]
    template = model_of(folder, "model.chat_template='{{ messages[0].content }}!'").tokenizer.template
    assert template is not None
    assert template.render(user, {}) == template.render(user, {}, [{"type": "function"}]) == "hi!"


def test_a_template_that_does_not_compile_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        model_of(folder, "model.chat_template='{% if %}'")
