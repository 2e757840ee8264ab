"""`kvasir verify` against a deployment with real engines, prefill and decode apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow


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


def test_accuracy_is_that_of_the_model_itself_and_not_that_of_an_adapter(
    stack: Stack, tmp_path: Path
) -> None:
    prefix = tmp_path / "report"
    shared = ("verify", "--prompt-tokens", "256", "--streams", "0", "--quality-tokens", "2000")
    first = stack.kvasir(*shared, "--quality", "--report", str(prefix))
    assert first.returncode == 0, first.stdout + first.stderr
    baseline = ("--quality-baseline", f"{prefix}.quality.json")
    same = stack.kvasir(*shared, *baseline, "--max-kl", "1e-4", "--min-agreement", "0.995")
    assert same.returncode == 0, same.stdout + same.stderr
    other = stack.kvasir(*shared, "--model", "pirate", *baseline)
    assert other.returncode == 1, other.stdout + other.stderr
    assert "ERR most likely tokens as in the baseline" in other.stdout


@pytest.mark.soak
def test_weights_of_eight_bits_are_close_to_the_original_and_told_from_it(
    start_stack: Callable[..., AbstractContextManager[Stack]], tmp_path: Path
) -> None:
    scores = tmp_path / "before"
    shared = ("verify", "--prompt-tokens", "256", "--streams", "0")
    few = ("--set", "disaggregation=never", "--set", "pools=[{name: all, role: both}]")
    for name, more in (("original", ()), ("int8", ("--set", "model.quantization=int8"))):
        home = tmp_path / name
        home.mkdir()
        with start_stack(home, *few, "--set", f"name={name}", *more) as running:
            if name == "original":
                run = running.kvasir(*shared, "--quality", "--report", str(scores))
                assert run.returncode == 0, run.stdout + run.stderr
                continue
            baseline = ("--quality-baseline", f"{scores}.quality.json")
            close = running.kvasir(*shared, *baseline)
            assert close.returncode == 0, close.stdout + close.stderr
            strict = running.kvasir(*shared, *baseline, "--max-kl", "1e-6", "--min-agreement", "1")
            assert strict.returncode == 1, strict.stdout + strict.stderr
            assert "ERR KL divergence from the baseline" in strict.stdout


def test_what_cannot_be_verified_is_said_at_once(stack: Stack) -> None:
    for arguments, told in (
        (("--model", "other"), "--model other: this deployment serves kvasir-tiny"),
        (("--prompt-tokens", "100000"), "--prompt-tokens: the model's context is"),
        (("--report", "/nowhere/x"), "--report /nowhere/x.json: /nowhere is not a folder"),
    ):
        run = stack.kvasir("verify", *arguments)
        assert run.returncode == 2, run.stdout
        assert told in run.stderr
