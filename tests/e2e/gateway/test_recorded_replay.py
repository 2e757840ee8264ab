"""Requests through gateway, router and simulated workers, recorded, and replayed under other policies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvasir.core.requests import SloClass
from kvasir_platform.cli.main import main
from kvasir_platform.sim.replay.outcome import ReplayOutcome
from kvasir_platform.sim.replay.replay import Setting, TraceReplay
from kvasir_platform.sim.replay.replica import a800_node, promise
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS, open_workload
from kvasir_platform.workload.requests import Workload
from kvasir_router.decide import make_policy

SECRET = "the launch code is hazel-nut-77"
DOCUMENTS = [
    f"Document {number}. {SECRET}. " + "A router knows what every worker holds. " * 90 for number in range(4)
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask routers twenty times a second."""
    monkeypatch.setattr("kvasir_platform.cli.record.run.POLL_S", 0.05)


def simulated(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    """What `kvasir sim` says of the recording, slow enough that no request waits for another."""
    capsys.readouterr()
    assert main(["sim", "--json", "--workload", f"{path}:speed=0.05", "--block", "32", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def replayed(workload: Workload, policy: str, workers: int = 4, slo: SloClass | None = None) -> ReplayOutcome:
    node = a800_node(device_share=0.05, cpu_bytes=0.0)
    setting = Setting(workload, node, slo or promise(node, 1000), speed_up=1.0, workers=workers)
    return TraceReplay(setting, make_policy(policy, "never", Random(1))).run()


async def recorded(product: Any, path: Path, questions: list[str], *options: str) -> None:
    """Record while these are asked in turn."""
    recording = asyncio.create_task(product.kvasir("record", str(path), "--duration", "60", *options))
    while not product.cluster.router.recordings.active:
        await asyncio.sleep(0.01)
    for number, question in enumerate(questions):
        await product.ask(question, **{"x-session-id": f"session-of-alice-{number % 4}"})
    assert await recording == 0


async def test_a_recording_is_replayed_under_two_policies_and_another_fleet_and_promise(
    product: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traffic.jsonl"
    questions = [f"{DOCUMENTS[number % 4]} Question {number}?" for number in range(16)]
    await recorded(product, path, questions, "--requests", "16")
    text = path.read_text()
    for content in ("hazel", "router knows", "alice"):
        assert content not in text
    header, *rows = map(json.loads, text.splitlines())
    assert (header["complete"], header["requests"], header["dropped"]) == (True, 16, 0)
    assert {row["outcome"]["finish"] for row in rows} == {"length"}
    assert all(row["outcome"]["ttft_s"] > 0.0 and row["outcome"]["itl_s"] > 0.0 for row in rows)
    # What the engines found cached is what the names of blocks say that they share.
    assert [row["outcome"]["cached_tokens"] > 0 for row in rows] == [False] * 4 + [True] * 12
    assert all(row["decision"]["parts"]["prefill"]["considered"] == 2 for row in rows)
    assert len({row["session"] for row in rows}) == 4

    workload = open_workload(f"{path}:speed=1", Random(0)).with_blocks_of(TRACE_BLOCK_TOKENS)
    assert len(workload.requests) == 16
    assert workload.infinite_hits() >= 12 * TRACE_BLOCK_TOKENS
    by_cost, in_turn = replayed(workload, "cost"), replayed(workload, "round_robin", workers=3)
    assert by_cost.ended == in_turn.ended == 16
    assert by_cost.hit_rate(workload) > in_turn.hit_rate(workload) > 0.0
    assert by_cost.met == 1.0
    hurried = replayed(workload, "cost", slo=SloClass("hurried", ttft_s=1e-4, itl_s=1e-4))
    assert hurried.met == 0.0

    at_home = simulated(capsys, path, "--workers", "4")
    abroad = simulated(capsys, path, "--policy", "round_robin", "--workers", "3", "--gpu", "L40S")
    assert at_home["requests"] == abroad["requests"] == 16
    assert at_home["met_slo"] == abroad["met_slo"] == 1.0
    assert at_home["hit_rate"] > abroad["hit_rate"] > 0.0
    assert abroad["ttft_s"]["p50"] > at_home["ttft_s"]["p50"]
    assert "3 x both (1 x L40S)" in abroad["about"]
    assert "policy round_robin" in abroad["about"]
    assert simulated(capsys, path, "--slo", "ttft=0.0001,itl=0.0001")["met_slo"] == 0.0


async def test_two_recordings_share_names_only_with_one_salt(product: Any, tmp_path: Path) -> None:
    salt = tmp_path / "salt"
    salt.write_bytes(b"0123456789abcdef")
    names = {}
    for name, options in (
        ("a", ("--salt-file", str(salt))),
        ("b", ("--salt-file", str(salt))),
        ("c", ()),
    ):
        path = tmp_path / f"{name}.jsonl"
        await recorded(product, path, [DOCUMENTS[0]], "--requests", "1", *options)
        row = json.loads(path.read_text().splitlines()[1])
        names[name] = {row["session"], *row["prefix_hashes"]}
    assert names["a"] == names["b"]
    assert not names["a"] & names["c"]


async def test_a_router_that_nobody_records_keeps_nothing(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = product.cluster.router.recordings
    for method in ("arrived", "ended", "refused"):
        monkeypatch.setattr(recordings, method, None)
    await product.ask()
    assert not recordings.active
