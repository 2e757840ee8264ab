"""What a gateway reads of its models' folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kvasir.config.load.loader import loads
from kvasir.config.load.model_files import resolve_model
from kvasir_platform.gateway.start import make_models


def test_a_model_without_a_configured_length_has_that_of_its_folder(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("kvasir-tiny") / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1234}))
    spec = loads(f"model: {{source: {tmp_path}, max_model_len: auto}}", "t.yaml")
    models = make_models(spec)
    assert [model.context for model in models.models] == [1234]
    models.close()
