"""Parts of the gateway bench that its figures depend on: counters, and the pacing of workers."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import pytest
from load_tests.report import Row, Run
from load_tests.scenarios.gateway import bodies, client, console, rows
from load_tests.scenarios.gateway.client import BenchError, Conversation
from load_tests.scenarios.gateway.fleet import scrape
from load_tests.scenarios.gateway.in_turn import https, observability
from load_tests.scenarios.gateway.measure import Samples
from load_tests.scenarios.gateway.pacing import Ticker
from load_tests.scenarios.gateway.processes import Child, ProcessError
from load_tests.scenarios.gateway.scripted_engine import ScriptedEngine
from load_tests.scenarios.gateway.usage import cpu_s, tree
from load_tests.scenarios.tokenizing import Texts

from kvasir.core.kv import KvBatch
from kvasir.core.requests import Delta, EngineRequest, FinishReason, Leg, Role, Sampling, StepBatch, token_ids

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b'9\r\ndata: {" the"}\n\n\r\n9\r\ndata: {" the the"}\n\n\r\n0\r\n\r\n'


def request(name: str, tokens: int, prompt: int = 40, leg: Leg = Leg.FULL) -> EngineRequest:
    return EngineRequest(name, token_ids(range(prompt)), Sampling(max_tokens=tokens), leg=leg)


async def started(engine: ScriptedEngine) -> list[StepBatch]:
    batches: list[StepBatch] = []
    await engine.start(batches.append, worker_id="w", epoch=1)
    return batches


def engine() -> ScriptedEngine:
    return ScriptedEngine("m", "both", Role.BOTH, "digest", 4096)


async def until_ended(batches: list[StepBatch], count: int) -> list[Delta]:
    async with asyncio.timeout(10):
        while sum(delta.last for batch in batches for delta in batch.deltas) < count:
            await asyncio.sleep(0.001)
    return [delta for batch in batches for delta in batch.deltas]


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_the_scripted_engine_answers_with_exactly_the_tokens_it_was_asked_for(tokens: int) -> None:
    async def run() -> None:
        one = engine()
        batches = await started(one)
        one.submit([request("r", tokens)])
        deltas = await until_ended(batches, 1)
        assert [delta.offset for delta in deltas] == list(range(tokens))
        assert [delta.last for delta in deltas] == [False] * (tokens - 1) + [True]
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.output_tokens == tokens

    asyncio.run(run())


def test_an_aborted_stream_ends_once_and_nothing_of_it_follows() -> None:
    async def run() -> None:
        one = engine()
        batches = await started(one)
        one.submit([request("gone", 1000), request("stays", 2)])
        one.abort(["gone", "unknown"])
        one.abort(["gone"])
        deltas = await until_ended(batches, 2)
        assert [delta.finish for delta in deltas if delta.request_id == "gone"] == [FinishReason.ABORT]

    asyncio.run(run())


def test_streams_of_one_group_share_a_message_and_groups_do_not() -> None:
    async def run(groups: int) -> float:
        one = engine()
        batches = await started(one)
        one.regroup(groups)
        one.submit([request(f"r{i}", 9) for i in range(8)])
        await until_ended(batches, 8)
        return one.deltas / one.messages

    assert asyncio.run(run(1)) == 8
    assert asyncio.run(run(4)) == 2


def test_a_prompt_s_blocks_are_reported_once_and_found_cached_afterwards() -> None:
    async def run() -> None:
        one = engine()
        reported: list[KvBatch] = []
        one.kv.subscribe(reported.append)
        batches = await started(one)
        one.submit([request("first", 1), request("again", 1)])
        deltas = await until_ended(batches, 2)
        assert [delta.usage.cached_tokens for delta in deltas if delta.usage] == [0, 32]
        assert [len(batch.log) for batch in reported] == [16 + 2 * 8]

    asyncio.run(run())


def test_a_prefill_leg_ends_with_its_handoff() -> None:
    async def run() -> None:
        one = engine()
        batches = await started(one)
        one.submit([request("p", 50, leg=Leg.PREFILL)])
        (delta,) = await until_ended(batches, 1)
        assert delta.handoff is not None
        assert delta.handoff.blocks == 2

    asyncio.run(run())


def test_a_ticker_rests_when_there_is_nothing_left_and_begins_again() -> None:
    async def run() -> None:
        left = 3
        rested = asyncio.Event()

        def tick() -> bool:
            nonlocal left
            left -= 1
            if not left:
                rested.set()
            return left > 0

        ticker = Ticker(tick, 0.001)
        for _ in range(2):
            left = 3
            rested.clear()
            ticker.start()
            ticker.start()
            async with asyncio.timeout(10):
                await rested.wait()

    asyncio.run(run())


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_the_client_counts_every_token_and_finds_the_end_wherever_the_bytes_are_split(piece: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        conversation = Conversation(f"127.0.0.1:{server.getsockname()[1]}")
        peer, _ = server.accept()
        with conversation.sock, peer:
            conversation.sock.setblocking(True)
            assert conversation.ask(b"hello")
            # The status comes whole; the rest as it may.
            peer.sendall(HEAD)
            ended = conversation.read()
            for at in range(0, len(EVENTS), piece):
                assert not ended
                peer.sendall(EVENTS[at : at + piece])
                ended = conversation.read()
            assert ended
            assert conversation.tokens == 3


def test_the_client_tells_what_a_system_answered_that_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        conversation = Conversation(f"127.0.0.1:{server.getsockname()[1]}")
        peer, _ = server.accept()
        with conversation.sock, peer:
            conversation.sock.setblocking(True)
            conversation.ask(b"hello")
            peer.sendall(b"HTTP/1.1 429 Too Many\r\n\r\nslowly")
            with pytest.raises(BenchError, match="429 Too Many"):
                conversation.read()


def test_cpu_time_is_that_of_the_process_and_its_descendants(tmp_path: Path) -> None:
    spin = (
        "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('{}', flush=True)\nsys.stdin.read()"
    )
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spin!r}])"
    child = Child("outer", [sys.executable, "-c", outer], tmp_path)
    try:
        child.hear(30.0)
        assert len(tree(child.pid)) == 2
        assert cpu_s(child.pid) > 0.2
    finally:
        child.stop()
    assert not child.alive
    assert tree(child.pid) == []


def test_a_process_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    child = Child("dies", [sys.executable, "-c", "import sys; sys.exit('out of marbles')"], tmp_path)
    try:
        with pytest.raises(ProcessError, match="out of marbles"):
            child.hear(30.0)
    finally:
        child.stop()


def test_a_measurement_that_failed_gives_no_figure_but_its_reason() -> None:
    samples = Samples()
    samples.add("kvasir", "100 B", {"cpu_s": 0.3, "count": 1000, "connections": 32})
    samples.add("dynamo", "100 B", {"error": "BenchError: nothing came"})
    names = [row.name for row in rows.request_rows(samples, ["kvasir", "dynamo"])]
    assert names == ["request, 100 B"]
    assert samples.wrong == {"dynamo, 100 B": "BenchError: nothing came"}


class Letters(Texts):
    """Texts that are made and not read."""

    def take(self, chars: int) -> str:
        return "a" * chars


def test_whole_requests_are_counted_by_the_tokens_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bodies, client):
        monkeypatch.setattr(module, "MEAN_OUTPUT", 10)
    monkeypatch.setattr(client, "_SETTLE_S", 0.05)
    monkeypatch.setattr(client, "Texts", Letters)
    argv = [sys.executable, "-m", "load_tests.scenarios.gateway.http_worker", "2"]
    worker = Child("worker", argv, tmp_path)
    try:
        address = worker.hear(30.0)["addresses"][0]
        assert worker.ask({"groups": 2}) == {"groups": 2}
        order = {"do": "whole", "address": address, "key": "none", "pid": worker.pid}
        figures = client.Client().obey(order | {"streams": 4, "chars": 500, "window_s": 0.5})
    finally:
        worker.stop()
    assert figures["requests"] > 0.0
    assert figures["cpu_s"] > 0.0


def test_no_two_whole_requests_begin_alike() -> None:
    requests = bodies.MeanRequests(Letters(), 64)
    taken = [json.loads(requests.take()) for _ in range(600)]
    beginnings = {each["messages"][0]["content"][:8] for each in taken}
    assert len(beginnings) == len(taken)
    assert {each["max_tokens"] for each in taken} == {bodies.MEAN_OUTPUT}


def test_a_whole_request_is_compared_with_the_cheapest_that_routes() -> None:
    samples = Samples()
    for name, cpu in (("kvasir", 0.5), ("haproxy", 0.1), ("vllm-router", 0.4), ("dynamo", 1.0)):
        figures = {"cpu_s": cpu, "requests": 100.0, "streams": 512, "wall_s": 2.0}
        samples.add(name, "whole, 32", figures)
    ours, theirs = rows.whole_rows(samples, ["kvasir", "haproxy"])
    assert (ours.name, ours.value, ours.peer, ours.ratio) == (
        "whole request, 32 streams a step",
        5.0,
        4.0,
        1.25,
    )
    assert "512 at a time, 50 a second; peer: vllm-router" in ours.note
    assert (theirs.name, theirs.peer) == ("whole request, 32 streams a step, haproxy", None)


def test_the_peer_of_a_row_is_the_cheapest_that_routes_and_not_the_floor() -> None:
    samples = Samples()
    for name, cpu in (("kvasir", 0.2), ("haproxy", 0.01), ("vllm-router", 0.25), ("dynamo", 0.5)):
        samples.add(name, "100 B", {"cpu_s": cpu, "count": 1000, "connections": 32})
    row = rows.request_rows(samples, ["kvasir"])[0]
    assert row.value == pytest.approx(0.2)
    assert row.peer == pytest.approx(0.25)
    assert row.ratio == pytest.approx(0.8)
    assert row.met


def measured(cpu: dict[str, float]) -> Samples:
    samples = Samples()
    for kind, of_kind in cpu.items():
        for what, of in (("100 B", "count"), ("chunk, 32", "tokens")):
            # Most of the work that is done every few seconds falls into one of the measurements.
            for part in (0.9, 0.8, 1.3):
                samples.add(kind, what, {"cpu_s": of_kind * part, of: 1000})
    return samples


def test_what_observing_costs_is_the_median_of_the_ratios_within_starts() -> None:
    starts = [
        # The machine slows down from start to start, by more than the routers differ.
        measured({"off": drift, "default": drift * on, "traced": drift * 1.32, "control": drift * 1.1})
        for drift, on in ((1.0, 1.092), (2.0, 1.2), (4.0, 1.05))
    ]
    found = {row.name: row for row in observability.rows_of(starts)}
    assert len(found) == 6
    on, traced, control = (
        found[f"observability, 100 B, {kind}"] for kind in ("default", "traced", "control")
    )
    assert on.value == pytest.approx(2400.0)
    assert on.peer == pytest.approx(2100.0)
    assert on.ratio == pytest.approx(1.04)
    assert on.met
    assert traced.ratio == pytest.approx(1.32 / 1.05)
    assert traced.met is None
    assert control.peer == pytest.approx(2000.0)
    assert control.ratio == pytest.approx(1.1)


def test_routers_take_turns_at_each_place_of_a_start() -> None:
    orders = [observability.turned("abcd", number) for number in range(8)]
    assert {tuple(sorted(order)) for order in orders} == {tuple("abcd")}
    for place in range(4):
        assert sorted(order[place] for order in orders) == sorted("abcd" * 2)


def test_the_pages_of_the_console_and_its_loads_in_a_browser_are_measured() -> None:
    one, five, view = console.console_rows(4, 40, 60, windows=1, window_s=1.0, loads=1)
    assert one.name == "console, 4 workers and 40 streams"
    assert five.name == "console, 4 workers and 40 streams, 5 viewers"
    assert min(one.value, five.value) > 0.0
    assert one.target == five.target == console.MOST_MS
    assert view.name == "console, until the first view"
    assert (view.unit, view.target) == ("ms", 1000.0)
    assert view.value > 0.0


def test_without_a_browser_the_console_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProcessError, match="chromium is not installed"):
        console.console_rows(workers=4, streams=40, ended=60)


def test_other_rows_of_the_report_keep_the_run_that_measured_them() -> None:
    earlier = Run("old", "2026-01-01", "a machine", "a command")
    report = [
        Row("request, 100 B", 0.8, "CPU s/1k", "lower", run=earlier),
        Row("observability, 100 B, default", 900.0, "CPU µs a request", "lower", run=earlier),
    ]
    assert rows.without(report, observability.BEGINNING) == report[:1]


def test_the_longest_wait_for_the_metrics_of_a_fleet_is_measured() -> None:
    row = scrape.scrape_row(workers=4)
    assert row.name == "fleet, metrics of 4 workers, the longest wait of others"
    assert row.spread is not None
    assert 0.0 < row.spread[0] <= row.value <= row.spread[1]


def test_a_row_over_https_is_the_median_of_ratios_within_rounds() -> None:
    samples = Samples()
    for ours, theirs in ((30.0, 10.0), (40.0, 20.0), (90.0, 30.0)):
        for kind, spent_s in (("ours", ours), ("haproxy", theirs)):
            figures = {"cpu_s": spent_s, "count": 1e6, "tokens": 1e6, "wall_s": 1e6}
            samples.add(kind, "100 B", figures)
            for deltas in https.MEASURED:
                samples.add(kind, f"chunk, {deltas}", figures)
    short, *chunks = https.rows_of(samples)
    assert (short.value, short.peer, short.ratio, short.met) == (0.04, 0.02, 3.0, None)
    assert [row.name for row in chunks] == [f"https, chunk, {n} deltas a message" for n in https.MEASURED]
    assert {(row.value, row.peer, row.ratio, row.met) for row in chunks} == {(40.0, 20.0, 3.0, False)}
