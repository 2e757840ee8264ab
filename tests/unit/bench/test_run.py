"""Whole runs against a scripted server over real HTTP: what is sent, left out and noted."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from tests.kit.openai_server import OpenAiScript, ScriptedAnswer, serving_openai

from kvasir.clock import MonotonicClock
from kvasir.core.errors import ConfigError
from kvasir_platform.bench.client.http_endpoint import HttpConnections, HttpTarget
from kvasir_platform.bench.load import LoadLimits
from kvasir_platform.bench.report.result import BenchResult
from kvasir_platform.bench.run import BenchOptions, BenchRun, prepared
from kvasir_platform.bench.slo import BenchSlo
from kvasir_platform.workload.requests import Workload, WorkloadRequest

CLOCK = MonotonicClock()


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload(requests, 16, "made")


def plain(prompt: int = 64, output: int = 3, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(0.0, prompt, output, array("Q", range(prompt // 16)), **more)


async def run(
    script: OpenAiScript, wanted: Workload, said: list[str] | None = None, **options: Any
) -> BenchResult:
    values: dict[str, Any] = {"limits": LoadLimits(), "slo": BenchSlo(), "warmup": 2} | options
    lines = said if said is not None else []
    async with (
        serving_openai(script) as url,
        HttpConnections(HttpTarget(url), 16, 20.0, CLOCK.now) as connections,
    ):
        asked, rng = BenchOptions(**values), random.Random(1)
        server = await prepared(connections, asked, lines.append, rng)
        made = BenchRun(connections, server, asked, clock=CLOCK, say=lines.append, rng=rng)
        return await made.measure(wanted)


def prompts(script: OpenAiScript) -> list[str]:
    """Those of the measurement, after two probes and two requests of the warm-up."""
    return [body["messages"][0]["content"] for body in script.bodies[4:]]


async def test_requests_are_sent_with_their_lengths_and_counted() -> None:
    script = OpenAiScript()
    found = await run(script, workload(plain(64), plain(100, 5)))
    assert sorted(body["max_tokens"] for body in script.bodies[4:]) == [3, 5]
    assert found.figures.prompt_tokens.max == 100
    assert found.figures.prompt_token_error == 0.0
    assert (found.figures.succeeded, found.figures.errors, found.notes) == (2, {}, ())


async def test_the_warm_up_does_not_warm_the_texts_that_are_measured() -> None:
    script = OpenAiScript()
    await run(script, workload(plain(64)))
    warm = {body["messages"][0]["content"] for body in script.bodies[2:4]}
    assert not warm & set(prompts(script))


async def test_each_round_of_a_closed_loop_has_other_texts() -> None:
    script = OpenAiScript()
    limits = LoadLimits(concurrency=1, duration_s=0.2)
    await run(script, workload(plain(64)), limits=limits)
    sent = prompts(script)
    assert len(sent) > 2
    assert len(set(sent)) == len(sent)


async def test_what_does_not_fit_the_model_is_left_out_and_said() -> None:
    said: list[str] = []
    script = OpenAiScript(context=512)
    found = await run(script, workload(plain(64), plain(600), plain(32, 0, embeds=True)), said)
    assert found.figures.requests == 1
    assert said == ["2 requests are left out: they do not fit chat of 512 tokens"]
    with pytest.raises(ConfigError, match="no request of the workload fits"):
        await run(script, workload(plain(600)))


async def test_a_recorded_request_without_output_asks_for_one_token() -> None:
    script = OpenAiScript()
    await run(script, workload(plain(64, 0)))
    assert script.bodies[-1]["max_tokens"] == 1


async def test_errors_are_counted_beside_what_succeeds() -> None:
    script = OpenAiScript()
    script.answer = lambda body: ScriptedAnswer(429 if body["max_tokens"] == 5 else 200, "slow down")
    found = await run(script, workload(plain(64), plain(64, 5)), warmup=0)
    assert found.figures.errors == {"http_429": 1}
    assert found.figures.details == {"http_429": "slow down"}
    assert found.figures.slo_share == 0.5


async def test_notes_name_what_the_server_refuses() -> None:
    found = await run(OpenAiScript(refused=frozenset({"ignore_eos"})), workload(plain(64)))
    assert found.notes == ("the server refuses ignore_eos: outputs may be shorter than asked for",)
    uncounted = await run(OpenAiScript(counts=False), workload(plain(64)))
    assert uncounted.notes[0].startswith("the server does not count prompt tokens")
