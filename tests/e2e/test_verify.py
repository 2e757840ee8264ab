"""`kvasir verify` against a deployment with real engines, prefill and decode apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_right_deployment_is_verified_and_measured(stack: Stack, tmp_path: Path) -> None:
    prefix = tmp_path / "report"
    run = stack.kvasir("verify", "--prompt-tokens", "64,700", "--streams", "1,4", "--report", str(prefix))
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert {check["result"] for check in found["checks"]} == {"pass"}
    names = [check["name"] for check in found["checks"]]
    assert "700 tokens, disaggregated: as one worker alone" in names
    moved = {each["prompt_tokens"]: each["moved_bytes"] for each in found["transfers"]}
    assert moved[700] > 8 * moved[64] > 0
    assert [each["streams"] for each in found["curve"]] == [1, 4]
    assert all(each["tokens_per_s"] > 0 for each in found["curve"])
    assert any("decode: vllm" in each for each in found["hardware"])
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_verified_is_said_at_once(stack: Stack) -> None:
    for arguments, told in (
        (("--model", "other"), "--model other: this deployment serves kvasir-tiny"),
        (("--prompt-tokens", "100000"), "--prompt-tokens: the model's context is"),
        (("--report", "/nowhere/x"), "--report /nowhere/x: /nowhere is not a folder"),
    ):
        run = stack.kvasir("verify", *arguments)
        assert run.returncode == 2, run.stdout
        assert told in run.stderr
