"""`disaggregation: auto` with real engines: the router decides for each request, and answers are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPEC = """
model: {source: kvasir-tiny, dtype: float32}
disaggregation: auto
pools:
  - {name: prefill, role: prefill, engine: {threads: 1}}
  - {name: decode, role: decode, engine: {threads: 1}}
"""


def test_short_prompts_run_whole_and_long_ones_apart_with_equal_tokens(
    start_stack: Callable[..., AbstractContextManager[Stack]], tmp_path: Path
) -> None:
    (tmp_path / "kvasir.yaml").write_text(SPEC)
    with start_stack(tmp_path, "-f", str(tmp_path / "kvasir.yaml")) as stack:
        asked = ("verify", "--prompt-tokens", "32,64,128,2000,3000,3500", "--streams", "0")
        report = str(tmp_path / "report")
        # The first run teaches the router what work costs here.
        for _ in range(2):
            run = stack.kvasir(*asked, "--report", report)
            assert run.returncode == 0, run.stdout + run.stderr
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    modes = {check["name"].partition(":")[0] for check in checks}
    assert any(mode.endswith(" tokens, aggregated") for mode in modes), modes
    assert any(mode.endswith(" tokens, disaggregated") for mode in modes), modes
