"""What checks of a cluster run in pods: streams through a router, and a look at the processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from load_tests.cluster_checks.site import IN_POD
from load_tests.cluster_checks.tools import CommandError, LocalTools
from tests.kit.openai_server import MODEL, OpenAiScript, ScriptedAnswer, serving_openai

TOKENS = 5


async def noticed(script: OpenAiScript, requests: int, streams: int = 2) -> dict[str, Any]:
    """What streams notice that run until the server has had `requests` of them."""
    async with serving_openai(script) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        settings = {
            "host": host,
            "port": int(port),
            "key": "k",
            "model": MODEL,
            "streams": streams,
            "tokens": TOKENS,
        }
        pipe = asyncio.subprocess.PIPE
        code = (IN_POD / "streams.py").read_text(encoding="utf-8")
        running = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe)
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps(settings).encode() + b"\n")
        assert await running.stdout.readline() == b"ready\n"
        while len(script.bodies) < requests:
            await asyncio.sleep(0)
        running.stdin.close()
        found: dict[str, Any] = json.loads(await running.stdout.read())
        assert await running.wait() == 0
        return found


def after_the_first(answer: ScriptedAnswer) -> Callable[[Mapping[str, Any]], ScriptedAnswer]:
    """The second and third request get this answer."""
    count = iter(range(10_000))

    def decide(_body: Mapping[str, Any]) -> ScriptedAnswer:
        return answer if next(count) in (1, 2) else ScriptedAnswer()

    return decide


async def test_whole_streams_are_counted_with_their_gaps() -> None:
    found = await noticed(OpenAiScript(key="k"), 8)
    assert found["streams"] >= 7
    assert (found["failed"], found["other_texts"], found["errors"]) == (0, 0, [])
    assert 0 < found["itl_p50_ms"] / 1000 <= found["longest_gap_s"] + 1e-4


async def test_a_stream_that_breaks_off_has_failed_with_the_reason() -> None:
    found = await noticed(OpenAiScript(answer=after_the_first(ScriptedAnswer(breaks_at=2))), 6)
    assert found["failed"] == 2
    assert all("IncompleteRead" in each or "cut after 4 characters" in each for each in found["errors"])


async def test_an_error_in_a_stream_is_a_failure() -> None:
    found = await noticed(OpenAiScript(answer=after_the_first(ScriptedAnswer(error_event=True))), 6)
    assert (found["failed"], "the worker was lost" in found["errors"][0]) == (2, True)


async def test_a_refusal_counts_by_whether_it_says_when_to_ask_again() -> None:
    later = await noticed(OpenAiScript(answer=after_the_first(ScriptedAnswer(503, retry_after_s=1))), 5)
    assert (later["refused_with_wait"], later["refused_without_wait"], later["failed"]) == (2, 0, 0)
    never = await noticed(OpenAiScript(answer=after_the_first(ScriptedAnswer(503))), 5)
    assert (never["refused_with_wait"], never["refused_without_wait"], never["failed"]) == (0, 2, 0)


async def test_a_look_at_the_processes_shows_how_threads_wait() -> None:
    code = (IN_POD / "processes.py").read_text(encoding="utf-8")
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    pipe = asyncio.subprocess.PIPE
    running = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=pipe, env=environment)
    assert running.stdout is not None
    found = json.loads(await running.stdout.read())
    await running.wait()
    (own,) = (each for each in found if each["pid"] == running.pid)
    assert own["threads"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert own["nice"] == os.nice(0)
    assert own["name"].startswith(sys.executable)
    assert own["started"] > 0


def test_a_command_that_fails_says_what_it_printed() -> None:
    code = "import sys; print('printed'); sys.exit('no such pod')"
    with pytest.raises(CommandError, match="no such pod") as caught:
        LocalTools().run([sys.executable, "-c", code])
    assert caught.value.output == "printed\n"
    with pytest.raises(CommandError, match="kubectl-of-nobody is not installed"):
        LocalTools().run(["kubectl-of-nobody", "get"])


def test_a_command_that_runs_ends_with_its_input() -> None:
    code = "import sys; print(sys.stdin.readline().strip(), flush=True); print(sys.stdin.read() or 'ended')"
    running = LocalTools().start([sys.executable, "-c", code], "hello")
    assert running.line() == "hello"
    assert running.finish() == "ended\n"
    running.kill()
