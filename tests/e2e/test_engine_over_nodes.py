"""One engine over two nodes, on real Ray and real vLLM: it serves and fails as a whole.

Both nodes are on this machine, each in a place of its own in Ray; their ranks meet over TCP as those of two
pods do.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from tests.kit.processes import command_line, lives

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow
StartStack = Callable[..., AbstractContextManager["Stack"]]

SPEC = """
version: kvasir/v1
disaggregation: never
model: {dtype: float32, max_model_len: 1024}
worker: {drain_s: 60}
pools:
  - {name: both, role: both, cpus: 0.1, engine: %s}
"""
ONE = "{threads: 1, kv_cache_bytes: 16777216}"
TWO = "{threads: 1, kv_cache_bytes: 16777216, tensor_parallel_size: 2, nodes: 2}"
KEPT = """
tiers: {cpu: {bytes: 67108864}}
"""
TIGHT = "{threads: 1, kv_cache_bytes: 4194304, tensor_parallel_size: 2, nodes: 2}"
# As the shared deployment `SPEAKING`, with the roles of the two engines exchanged.
BESIDE = f"""
version: kvasir/v1
disaggregation: auto
routing: {{policy: round_robin}}
model: {{dtype: float32, max_model_len: 1024}}
worker: {{drain_s: 60}}
pools:
  - {{name: both, role: both, cpus: 0.1, engine: {ONE}}}
  - {{name: decode, role: decode, cpus: 0.1, engine: {TWO}}}
"""
PATIENCE_S = 180.0
TOKENS, LONG = 64, 400


@contextlib.contextmanager
def _streaming(stack: Stack, tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    body = {"model": "kvasir-tiny", "prompt": "And it came to pass", "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()[:500]
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        yield (json.loads(line) for line in lines)


def _stream(stack: Stack, tokens: int) -> str:
    with _streaming(stack, tokens) as events:
        return "".join(choice["text"] for event in events for choice in event["choices"])


def _completed(stack: Stack, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the text, and where the router ran the request."""
    body = {"model": "kvasir-tiny", "prompt": "And it came to pass", "max_tokens": TOKENS, "temperature": 0}
    asked = body | {"ignore_eos": True} | options
    answer = httpx.post(f"{stack.url}/v1/completions", json=asked, headers=stack.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    (decision,) = stack.page(f"/decisions/{answer.headers['x-request-id']}").json()["decisions"]
    return answer.json()["choices"][0]["text"], decision


def _follower(stack: Stack) -> psutil.Process:
    for process in stack.processes():
        if command_line(process).startswith("ray::EngineFollower"):
            return process
    pytest.fail("no node follows")


def _whole(stack: Stack) -> list[psutil.Process]:
    """Every process of the engine: both nodes' and what is below them."""
    nodes = stack.replica("both"), _follower(stack)
    return [each for node in nodes for each in (node, *node.children(recursive=True))]


def _replaced(stack: Stack, how: Callable[[psutil.Process, psutil.Process], None]) -> None:
    """Do that to the engine's first and second node, and wait until another whole engine serves, and nothing
    of this one is left."""
    before, replica = _whole(stack), stack.replica("both")

    def serves() -> bool:
        with contextlib.suppress(pytest.fail.Exception):
            return stack.replica("both") != replica and [w["state"] for w in stack.workers()] == ["ready"]
        return False

    how(replica, _follower(stack))
    stack.wait_until(serves, PATIENCE_S, "a whole engine serves again")
    assert [each for each in before if lives(each)] == [], "half an engine lingers"


def test_two_nodes_are_one_worker_that_writes_what_one_node_writes_and_their_ranks_hand_their_heads_over(
    speaking: Stack,
) -> None:
    _hands_over(speaking)


@pytest.mark.soak
def test_an_engine_over_two_nodes_takes_heads_over_and_writes_what_one_node_writes(
    start_stack: StartStack, tmp_path: Path
) -> None:
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(BESIDE)
    with start_stack(tmp_path, "-f", str(spec)) as stack:
        _hands_over(stack)


def _hands_over(stack: Stack) -> None:
    def ready() -> bool:
        states = {worker["pool"]: worker["state"] for worker in stack.workers()}
        return (states.get("both"), states.get("decode")) == ("ready", "ready")

    stack.wait_until(ready, PATIENCE_S, "two workers")
    moved = stack.metric("kvasir_transferred_bytes_total")
    whole = [_completed(stack, prompt_logprobs=0) for _ in range(2)]
    assert len({decision["decode_worker"] for _, decision in whole}) == 2, "each engine wrote it once"
    assert stack.metric("kvasir_transferred_bytes_total") == moved
    apart, decision = _completed(stack)
    assert decision["prefill_worker"] not in (None, decision["decode_worker"])
    assert {apart} == {text for text, _ in whole}
    assert stack.metric("kvasir_transferred_bytes_total") > moved
    assert stack.metric("kvasir_worker_transfers_failed_total") == 0


@pytest.mark.soak
def test_each_node_keeps_its_part_of_a_prompt_in_memory_until_the_engine_is_lost(
    start_stack: StartStack, tmp_path: Path
) -> None:
    """The device's cache has room for two prompts."""
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(SPEC % TIGHT + KEPT)
    prompts = [f"{number} " + "and it came to pass in those days " * 80 for number in range(6)]
    with start_stack(tmp_path, "-f", str(spec)) as stack:
        texts = [_completed(stack, prompt=prompt)[0] for prompt in prompts]
        assert stack.metric("kvasir_tier_tokens_total") == 0
        assert [_completed(stack, prompt=prompt)[0] for prompt in prompts[:2]] == texts[:2]
        loaded = stack.metric("kvasir_tier_tokens_total")
        assert loaded > 2 * 128
        _replaced(stack, lambda first, second: second.kill())
        assert [_completed(stack, prompt=prompt)[0] for prompt in prompts[:2]] == texts[:2]
        assert stack.metric("kvasir_tier_tokens_total") == loaded, "the memory of the lost engine is not used"


@pytest.fixture(scope="module")
def two(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine on two nodes."""
    home = tmp_path_factory.mktemp("two")
    spec = home / "kvasir.yaml"
    spec.write_text(SPEC % TWO)
    with start_stack(home, "-f", str(spec)) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(two: Stack) -> str:
    """What it writes."""
    return _stream(two, TOKENS)


def _ports_of_ranks(stack: Stack) -> dict[int, set[str]]:
    """The ports on which processes below both nodes listen, and their addresses."""
    found: dict[int, set[str]] = {}
    for node in (stack.replica("both"), _follower(stack)):
        for rank in node.children(recursive=True):
            for each in rank.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.setdefault(each.laddr.port, set()).add(each.laddr.ip)
    return found


@pytest.mark.soak
def test_a_stranger_gets_no_connection_to_any_port_between_the_nodes_and_disturbs_no_stream(
    two: Stack, expected: str
) -> None:
    ports = _ports_of_ranks(two)
    # The store, a queue of steps, a queue of results for each rank, and gloo's groups.
    assert len(ports) > 4, ports

    def knock(port: int) -> str:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                return f"{ports[port]}:{port} is open: {connection.recv(16)!r}"
        except TimeoutError:
            return ""

    with _streaming(two, LONG) as events:
        next(events)
        with ThreadPoolExecutor(len(ports)) as strangers:
            assert [answer for answer in strangers.map(knock, ports) if answer] == []
        assert sum(len(event["choices"]) for event in events) > LONG // 2
    assert _stream(two, TOKENS) == expected


# Nothing is computed meanwhile, so that no rank would ever notice that the others are gone.
@pytest.mark.soak
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda first, second: second.kill(), id="second node"),
        pytest.param(lambda first, second: second.children()[-1].kill(), id="rank of the second node"),
        pytest.param(lambda first, second: first.kill(), id="first node"),
    ],
)
def test_an_engine_that_loses_a_part_goes_as_a_whole_and_comes_back(
    two: Stack, expected: str, loss: Callable[[psutil.Process, psutil.Process], None]
) -> None:
    _replaced(two, loss)
    assert _stream(two, TOKENS) == expected


@pytest.mark.soak
def test_a_pod_of_the_second_node_that_is_ended_lets_streams_come_to_their_end(two: Stack) -> None:
    def end(first: psutil.Process, second: psutil.Process) -> None:
        with _streaming(two, LONG) as events:
            next(events)
            second.send_signal(signal.SIGTERM)
            assert sum(len(event["choices"]) for event in events) > LONG // 2
        assert lives(first), "the stream was taken up by another engine"

    _replaced(two, end)
