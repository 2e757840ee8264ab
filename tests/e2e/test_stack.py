"""The whole path with everything real: openai client, gateway, router, gRPC, Ray Serve, vLLM, NIXL."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from load_tests.scenarios.scorecard import real_engines
from tests.kit.footprint import Footprint

from kvasir.clock import MonotonicClock

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow
MODEL = "kvasir-tiny"
PSALM = "And it came to pass"


def _client(stack: Stack, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, **options)


def test_a_chat_streams_and_counts_its_usage(stack: Stack) -> None:
    chunks = list(
        _client(stack).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usage = chunks[-1].usage
    assert usage is not None
    assert 1 <= usage.completion_tokens <= 12
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]


def test_streamed_text_equals_text_that_is_not_streamed(stack: Stack) -> None:
    client = _client(stack)
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "In the beginning",
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.completions.create(**options)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert streamed == whole.choices[0].text
    assert len(streamed) > 10


def test_prompts_are_prefilled_apart_and_their_kv_moves(stack: Stack) -> None:
    before = stack.metric("kvasir_transferred_bytes_total")
    prompt = "".join(f"{number} and the waters " for number in range(60))
    _client(stack).completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
    assert stack.metric("kvasir_transferred_bytes_total") > before


def test_the_console_answers_at_the_address_that_kvasir_up_prints(stack: Stack) -> None:
    moved = httpx.get(f"{stack.url}/console", follow_redirects=True, timeout=10)
    assert str(moved.url) == f"{stack.url}/console/"
    assert moved.headers["content-type"].startswith("text/html")
    assert 'src="./console.js"' in moved.text
    assert stack.page("/console/console.js").text


def test_a_second_request_with_the_same_prefix_hits_the_cache(stack: Stack) -> None:
    client = _client(stack)
    prompt = "".join(f"{number} years did he reign in the city " for number in range(80))
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= second.usage.prompt_tokens - 2 * 32


def test_processes_of_an_engine_share_the_machine_with_others(stack: Stack) -> None:
    for pool in ("prefill", "decode"):
        replica = stack.replica(pool)
        children = replica.children(recursive=True)
        told = [child.environ() for child in children]
        assert ("PASSIVE", "1") in [
            (each.get("OMP_WAIT_POLICY"), each.get("OMP_NUM_THREADS")) for each in told
        ]
        assert {process.nice() for process in [replica, *children]} == {os.nice(0)}


def test_all_processes_are_in_one_session(stack: Stack) -> None:
    assert {os.getsid(each.pid) for each in stack.processes()} == {os.getsid(0)}


def test_both_pools_are_replicas_in_ray_serve(stack: Stack) -> None:
    status = stack.kvasir("status", "-o", "json")
    assert status.returncode == 0, status.stderr
    pools = {worker["pool"]: worker["state"] for worker in stack.workers()}
    assert pools == {"prefill": "ready", "decode": "ready"}
    replicas = {each["pool"]: each["detail"] for each in json.loads(status.stdout)[0]["replicas"]}
    assert replicas == {"prefill": "RUNNING", "decode": "RUNNING"}
    assert stack.replica("prefill").pid != stack.replica("decode").pid


def test_the_log_of_a_worker_is_its_own(stack: Stack) -> None:
    for worker in stack.workers():
        found = stack.kvasir("logs", worker["worker_id"], "-n", "1000000")
        assert found.returncode == 0, found.stderr
        named = re.findall(r"this is worker ([^ ,]+), at", found.stdout)
        assert named == [worker["worker_id"]]


def test_a_cancelled_request_is_aborted_in_the_engine(stack: Stack) -> None:
    stream = _client(stack).completions.create(
        model=MODEL,
        prompt="And it came to pass",
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert any((worker["load"] or {}).get("running") for worker in stack.workers())
    stream.close()
    took = stack.wait_until(
        lambda: all(
            not worker["in_flight"] and not (worker["load"] or {}).get("running")
            for worker in stack.workers()
        ),
        5.0,
        "the engine to have stopped the request",
    )
    # The promise is 200 ms; the bound here only tells an abort from a stream that ran to its end.
    assert took < 3.0


def test_a_client_that_times_out_leaves_nothing_running(stack: Stack) -> None:
    with pytest.raises(openai.APITimeoutError):
        _client(stack, timeout=0.3).completions.create(
            model=MODEL, prompt=PSALM, max_tokens=3000, extra_body={"ignore_eos": True}
        )
    stack.wait_until(
        lambda: not any(w["in_flight"] for w in stack.workers()), 5.0, "the request to be cancelled"
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, "model_not_found"),
        ({"model": MODEL, "prompt": "and " * 6000}, 400, "context_length_exceeded"),
        ({"model": MODEL, "prompt": "x", "temperature": -1}, 400, None),
        ({"model": MODEL, "prompt": "x", "colour": "red"}, 400, None),
    ],
)
def test_a_bad_request_gets_an_error_and_disturbs_no_stream(
    stack: Stack, body: dict[str, Any], status: int, code: str | None
) -> None:
    stream = _client(stack).completions.create(
        model=MODEL, prompt=PSALM, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert answer.headers["x-request-id"]
    if code is not None:
        assert error["code"] == code
    *_, last = chunks
    assert last.choices[0].finish_reason == "length"


class Replicas(real_engines.Stage):
    """The workers of a deployment as the scorecard's: killed by their replica."""

    def __init__(self, stack: Stack, clock: MonotonicClock) -> None:
        super().__init__(stack.address, {}, real_engines.Client(stack.address, clock), clock)
        self._stack = stack

    async def kill_busiest(self, pool: str) -> None:
        """Kill the only replica of a pool, in the midst of streams."""
        (worker,) = [each for each in self._stack.workers() if each["pool"] == pool]
        assert worker["in_flight"]
        self._stack.replica(pool).kill()


async def test_streams_on_a_killed_decode_replica_go_on_token_for_token_and_it_is_replaced(
    stack: Stack,
) -> None:
    before = {worker["worker_id"] for worker in stack.workers()}
    replicas = Replicas(stack, MonotonicClock())
    try:
        survived = await real_engines.decode_worker_killed(replicas)
    finally:
        await replicas.client.close()
    assert survived.exact == survived.streams
    assert {output for _, output in survived.usage} == {1200}
    assert stack.metric("kvasir_cross_role_requests_total") >= survived.moved > 0
    _replaced(stack, "decode", before)


@pytest.mark.soak
def test_a_killed_prefill_replica_is_replaced_with_no_hand(stack: Stack) -> None:
    before = {worker["worker_id"] for worker in stack.workers()}
    stack.replica("prefill").kill()
    _replaced(stack, "prefill", before)


def _replaced(stack: Stack, pool: str, before: set[str]) -> None:
    """Return once another worker of the pool is in use and traffic has resumed."""
    stack.wait_until(
        lambda: any(
            worker["pool"] == pool and worker["state"] == "ready" and worker["worker_id"] not in before
            for worker in stack.workers()
        ),
        120.0,
        f"Ray Serve to replace the {pool} replica",
    )
    answer = _client(stack, timeout=60).completions.create(
        model=MODEL, prompt="In the beginning", max_tokens=4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1


def test_the_idle_stack_holds_no_blocks_and_no_requests(stack: Stack) -> None:
    began = time.monotonic()
    stack.wait_until(
        lambda: all(
            not worker["in_flight"] and not (worker["load"] or {}).get("kv_blocks_leased")
            for worker in stack.workers()
        ),
        30.0,
        "leases to end",
    )
    assert time.monotonic() - began < 30.0


@pytest.mark.stops_stack
def test_ctrl_c_leaves_no_process_port_shared_memory_or_ray_session(stack: Stack) -> None:
    footprint = Footprint.of(stack)
    assert len(footprint.processes) > 8
    assert (footprint.temp_dir / "ray").exists()
    assert footprint.shared_memory
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(timeout=90) == 0
    footprint.assert_gone()
