"""`kvasir plan --write` writes what `kvasir up` starts, with real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from openai import OpenAI
from tests.kit.stack import Stack

from kvasir_platform.cli.main import main

pytestmark = pytest.mark.slow
StartStack = Callable[..., AbstractContextManager[Stack]]


def test_a_plan_that_was_written_serves(start_stack: StartStack, tmp_path: Path) -> None:
    load = ("--gpus", "CPU:2", "--rate", "0.2", "--prompt-tokens", "100", "--output-tokens", "20")
    written = tmp_path / "plan"
    assert main(["plan", "kvasir-tiny", *load, "--slo", "ttft=5,itl=0.5", "--write", str(written)]) == 0
    with (
        start_stack(tmp_path, "-f", str(written / "kvasir.yaml")) as stack,
        OpenAI(base_url=f"http://{stack.address}/v1", api_key="none", timeout=60) as client,
    ):
        answer = client.chat.completions.create(
            model="kvasir-tiny", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
        )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
