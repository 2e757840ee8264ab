"""`disaggregation: auto` with real engines: the router decides for each request, and answers are the same."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import openai
import pytest
from tests.kit.stack import Stack, another_router

pytestmark = pytest.mark.slow

ITL = {"name": "default", "itl_s": 0.0002}
"""So short that no step keeps it. One that a step keeps with a few streams and not with more, as this machine
is fast or slow, would hold the long prompt back until a stream ends."""
STREAMS = 8
"""As many as live at the same time in the KV of the decode worker, so that their wait decides, whatever the
two engines were seen to take for a prompt."""
LONG_TOKENS = 3000
_MOVED = "transfer"


def test_short_prompts_run_whole_and_long_ones_apart_from_streams_with_equal_tokens(
    stack: Stack, tmp_path: Path
) -> None:
    # Engines do not know the mode: a router decides for each request.
    with another_router(stack, tmp_path, disaggregation="auto", slo=[ITL], telemetry={}) as auto:
        report = str(tmp_path / "report")
        # This also teaches the router what work costs here.
        asked = ("verify", "--prompt-tokens", "32,64,128,2000,3000,3500", "--streams", "0")
        run = auto.kvasir(*asked, "--report", report, "--address", auto.address)
        assert run.returncode == 0, run.stdout + run.stderr
        checks = json.loads((tmp_path / "report.json").read_text())["checks"]
        modes = {check["name"].partition(":")[0] for check in checks}
        assert any(mode.endswith(" tokens, aggregated") for mode in modes), modes

        # A long prompt beside streams would make each of them wait for all of it.
        prompt = random.Random(1).choices(range(300, 900), k=LONG_TOKENS)
        with ThreadPoolExecutor(STREAMS) as threads:
            began, streams = [Event() for _ in range(STREAMS)], []
            for number, begins in enumerate(began):
                streams.append(threads.submit(_stream, auto, number, begins))
            assert all(begins.wait(60) for begins in began)
            apart, timing = _complete(auto, prompt)
            assert not all(stream.done() for stream in streams), timing
            assert {stream.result() for stream in streams} == {"length"}
        assert _MOVED in timing, "the long prompt ran beside the streams"
        alone, timing = _complete(auto, prompt, whole=True)
        assert _MOVED not in timing
        assert apart == alone


def _stream(stack: Stack, number: int, begins: Event) -> str | None:
    """Read a stream to its end. Return why it ended."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        reason = None
        for chunk in client.completions.create(
            model="kvasir-tiny",
            prompt=f"{number}: And it came to pass",
            max_tokens=1500,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            begins.set()
            reason = chunk.choices[0].finish_reason or reason
        return reason


def _complete(stack: Stack, prompt: list[int], *, whole: bool = False) -> tuple[str, str]:
    """Return the greedy completion, and what took its time: _MOVED too if KV was moved for it. `whole`: on
    one worker alone."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answer = client.completions.with_raw_response.create(
            model="kvasir-tiny",
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            extra_body={"ignore_eos": True} | ({"prompt_logprobs": 0} if whole else {}),
        )
        return answer.parse().choices[0].text, answer.headers.get("server-timing", "")
