"""What a worker decides about its model's KV before it starts an engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.kit.model_folder import write_model

from kvasir.config.spec.deployment import Deployment, ModelSpec, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role
from kvasir_workers.engines.vllm.setup.movement import movement_of

APART = Deployment(model=ModelSpec(served_name="m"))
WHOLE = Deployment(
    model=ModelSpec(served_name="m"),
    disaggregation="never",
    pools=(PoolSpec(name="both", role=Role.BOTH),),
)
HYBRID = {"model_type": "qwen3_next", "num_hidden_layers": 4}
INTERLEAVED = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 512}


def test_what_cannot_be_moved_is_refused_with_the_field_to_set(tmp_path: Path) -> None:
    folder = write_model(tmp_path, HYBRID)
    with pytest.raises(
        ConfigError, match=r"3 of its 4 layers keep a recurrent state .*disaggregation: never"
    ):
        movement_of(APART, folder)
    assert movement_of(WHOLE, folder) is None


def test_the_cost_of_moving_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    movement = movement_of(APART, write_model(tmp_path, INTERLEAVED))
    assert movement is not None
    assert movement.widened == 5
    assert "5 of 6 layers attend to the last 512 tokens only" in caplog.text
