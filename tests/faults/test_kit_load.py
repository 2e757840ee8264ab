"""Test clients detect faults of a stream: a token lost, repeated or changed, a gap, an error, a cut."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random

import pytest
from tests.kit.lab.gateway import metric
from tests.kit.lab.invariants import Descriptors, Violated, invariant_violations
from tests.kit.lab.load import OpenLoop, asks, quantile, tally
from tests.kit.lab.stream import Ask, complete, expected_text, open_stream

from kvasir.clock import MonotonicClock

ASK = Ask(prompt=(5, 6, 7), tokens=4)
USAGE = {"prompt_tokens": 3, "completion_tokens": 4}
CLOCK = MonotonicClock()


def words(ask: Ask = ASK) -> list[str]:
    return [" " + word for word in expected_text(ask).split(" ")[1:]]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def answer(texts: Sequence[str], usage: dict[str, int] | None = None) -> list[bytes]:
    """The events of a well-formed stream of these words."""
    events = [token(text) for text in texts[:-1]] + [token(texts[-1], "length")]
    return [*events, event({"choices": [], "usage": usage or USAGE}), b"data: [DONE]\n\n"]


class Gateway:
    """Answers every request with the bytes that it was given."""

    def __init__(self) -> None:
        self.events: list[bytes] = answer(words())
        self.head = b"HTTP/1.1 200 OK\r\nx-request-id: r-1\r\ntransfer-encoding: chunked\r\n\r\n"
        self.then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
        self.requests = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.requests += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.head)
            for each in self.events:
                writer.write(b"%x\r\n%b\r\n" % (len(each), each))
            if self.then is not None:
                await self.then(writer)
            else:
                writer.write(b"0\r\n\r\n")
                await reader.read()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def address(gateway: Gateway) -> AsyncIterator[str]:
    yield await gateway.start()
    await gateway.stop()


async def test_a_right_answer_is_exact(address: str) -> None:
    outcome = await complete(address, ASK, CLOCK)
    assert outcome.exact, outcome
    assert outcome.request_id == "r-1"
    assert len(outcome.times_s) == 4
    assert tally([outcome]).all_exact


@pytest.mark.parametrize(
    "texts",
    [
        [*words()[:1], *words()[2:]],
        [*words()[:2], *words()[1:]],
        [*words()[:3], " other"],
        [words()[1], words()[0], *words()[2:]],
    ],
    ids=["lost", "repeated", "changed", "reordered"],
)
async def test_a_wrong_token_is_seen(gateway: Gateway, address: str, texts: list[str]) -> None:
    gateway.events = answer(texts)
    outcome = await complete(address, ASK, CLOCK)
    assert not outcome.exact
    assert tally([outcome]).errors == {"wrong_tokens": 1}


async def test_a_wrong_usage_is_seen(gateway: Gateway, address: str) -> None:
    gateway.events = answer(words(), {"prompt_tokens": 3, "completion_tokens": 5})
    assert not (await complete(address, ASK, CLOCK)).exact


async def test_an_error_in_mid_stream_has_its_code(gateway: Gateway, address: str) -> None:
    gateway.events = [token(words()[0]), event({"error": {"code": "worker_lost", "message": "it went"}})]
    outcome = await complete(address, ASK, CLOCK)
    assert (outcome.error, outcome.detail) == ("worker_lost", "it went")


async def test_a_refusal_has_the_code_of_its_body(gateway: Gateway, address: str) -> None:
    body = json.dumps({"error": {"code": "queue_full", "message": "full"}}).encode()
    gateway.head = b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n"
    gateway.events = [body]
    outcome = await complete(address, ASK, CLOCK)
    assert (outcome.error, outcome.detail) == ("queue_full", "full")


async def test_a_stream_that_ends_early_is_cut(gateway: Gateway, address: str) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    gateway.events, gateway.then = [token(words()[0])], close
    assert (await complete(address, ASK, CLOCK)).error == "cut"


async def test_bytes_that_are_no_http_are_malformed(gateway: Gateway, address: str) -> None:
    gateway.head = b""
    outcome = await complete(address, ASK, CLOCK)
    assert outcome.error == "malformed"
    assert "data:" in outcome.detail


async def test_a_refused_connection_is_an_outcome() -> None:
    assert (await complete("127.0.0.1:1", ASK, CLOCK)).error == "refused"


async def test_a_client_that_disconnects_is_seen_as_reset(gateway: Gateway, address: str) -> None:
    gone = asyncio.Event()

    async def until_gone(writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            gone.set()
            raise

    gateway.events, gateway.then = [token(words()[0])], until_gone
    stream = await open_stream(address, ASK, CLOCK)
    await stream.begun.wait()
    stream.disconnect()
    await asyncio.wait_for(gone.wait(), 5.0)
    await stream.ended.wait()
    assert stream.outcome.error == "disconnected"


async def test_an_open_loop_does_not_wait_for_answers_and_tells_what_it_left_out(
    gateway: Gateway, address: str
) -> None:
    never = asyncio.Event()

    async def hang(_writer: asyncio.StreamWriter) -> None:
        await never.wait()

    gateway.events, gateway.then = [], hang
    load = OpenLoop([address], asks(Random(1), 3, 4), 2000.0, clock=CLOCK, rng=Random(1), limit=5)
    load.start()
    while not load.skipped:
        await asyncio.sleep(0)
    assert load.under_way == 5
    with pytest.raises(TimeoutError, match="5 streams did not end"):
        await load.stop(0.05)


async def test_prompts_come_from_the_seed() -> None:
    assert next(asks(Random(3), 9, 1)) == next(asks(Random(3), 9, 1))
    assert next(asks(Random(3), 9, 1)) != next(asks(Random(4), 9, 1))


def test_a_quantile_is_one_of_the_samples() -> None:
    samples = [float(n) for n in range(1, 101)]
    assert quantile(samples, 0.99) == 99.0
    assert quantile(samples, 1.0) == 100.0
    assert quantile([2.0], 0.5) == 2.0


def test_metrics_are_summed_over_the_labels_that_were_not_named() -> None:
    text = 'a_total{pool="x",state="y"} 2.0\na_total{pool="x",state="z"} 3.0\na_total_more 9.0\nb 1.0\n'
    assert metric(text, "a_total", pool="x") == 5.0
    assert metric(text, "a_total", state="z") == 3.0
    assert metric(text, "b") == 1.0


def test_unrest_names_what_is_left_and_where() -> None:
    load = {"running": 1, "waiting": 0, "kv_blocks_leased": 3}
    worker = {"worker_id": "w", "state": "ready", "in_flight": 2, "load": load}
    gone = {"worker_id": "v", "state": "connecting", "in_flight": 0, "load": {"running": 5}}
    status = {"in_flight": 1, "workers": [worker, gone]}
    series = (
        "kvasir_requests_queued 4.0\nkvasir_router_leases 2.0\nkvasir_router_accounting_consistent 0.0\n"
        'kvasir_requests_total{model="m",outcome="protocol_error"} 1.0\n'
    )
    assert invariant_violations(status, series) == [
        "1 requests in flight",
        "w: 2 accounted",
        "w: 1 running",
        "w: 3 kv_blocks_leased",
        "kvasir_requests_queued is 4",
        "kvasir_router_leases is 2",
        "what is served and what is accounted do not agree",
        "1 streams lost, repeated or invented tokens on a worker",
    ]
    still = {"in_flight": 0, "workers": [gone]}
    assert (
        invariant_violations(still, "kvasir_requests_queued 0.0\nkvasir_router_accounting_consistent 1.0\n")
        == []
    )


async def test_descriptors_that_stay_open_are_a_violation() -> None:
    class Alone:
        def pids(self) -> dict[str, int]:
            return {"me": os.getpid()}

    before = Descriptors(Alone())
    assert before.grown() == {}
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    try:
        assert before.grown() == {"me": 20}
        with pytest.raises(Violated, match="'me': 20"):
            await before.check(CLOCK, 0.0)
    finally:
        for each in opened:
            os.close(each)
    await before.check(CLOCK, 0.0)
