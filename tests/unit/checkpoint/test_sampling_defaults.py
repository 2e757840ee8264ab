"""The sampling parameters that generation_config.json states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.sampling_defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from kvasir.core.errors import ConfigError


def stated(folder: Path, **values: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return sampling_defaults(folder)


def test_a_model_without_the_file_changes_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == NEUTRAL == SamplingDefaults()


def test_only_what_is_stated_changes(tmp_path: Path) -> None:
    qwen3 = stated(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[1, 2])
    assert qwen3 == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert stated(tmp_path, temperature=None, top_k=-1) == NEUTRAL


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}])
def test_a_value_that_no_engine_takes_is_refused_with_its_file(
    values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/generation_config\.json: .*{next(iter(values))}"):
        stated(tmp_path, **values)
