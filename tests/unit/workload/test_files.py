"""Recorded workloads: Mooncake's and Azure's traces, and Kvasir's recordings."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.workload.files import (
    TRACE_BLOCK_TOKENS,
    open_workload,
    read_azure,
    read_mooncake,
    read_workload,
)
from kvasir_platform.workload.recording import header_line, request_line
from kvasir_platform.workload.requests import Workload, WorkloadRequest


def mooncake(path: Path, count: int) -> Path:
    """A trace behind one shared first block, in Mooncake's format."""
    rng = Random(3)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        ids = [0, *range(1 + number * 30, 1 + number * 30 + rng.randrange(1, 30))]
        length = len(ids) * TRACE_BLOCK_TOKENS + rng.randrange(TRACE_BLOCK_TOKENS)
        # As in the original: the block that is not whole has a name too.
        row = {"timestamp": number // 10 * 3000, "input_length": length}
        rows.append(row | {"output_length": rng.randrange(1, 300), "hash_ids": [*ids, -number]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Workload:
    return read_mooncake(mooncake(tmp_path / "trace.jsonl", 60), Random(1))


def test_requests_of_one_tick_come_within_it_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", 40)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trace = read_mooncake(path, Random(1))
    assert [r.prompt_tokens for r in trace.requests] == [row["input_length"] for row in rows]
    arrivals = [r.arrival_s for r in trace.requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == len(arrivals)
    for request, row in zip(trace.requests, rows, strict=True):
        assert 0.0 <= request.arrival_s - row["timestamp"] / 1000 < 3.0


def test_times_of_an_exact_clock_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    at_ms = [0, 7, 1200, 1200, 1950]
    lines = [{"timestamp": at, "input_length": 5, "output_length": 1, "hash_ids": []} for at in at_ms]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [each.arrival_s * 1e3 for each in read_mooncake(path, Random(1)).requests] == at_ms


def test_only_whole_blocks_have_names(trace: Workload) -> None:
    assert all(len(r.names) == r.prompt_tokens // TRACE_BLOCK_TOKENS for r in trace.requests)


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"time": 3}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2: KeyError\('timestamp'\)"):
        read_mooncake(path, Random(1))


def test_azures_prompts_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = ["2023-11-16 18:15:46.6805900,1374,44", "2023-11-16 18:15:50.9951690,1374,109"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    first, second = read_azure(path).requests
    assert first.arrival_s == 0.0
    assert second.arrival_s == pytest.approx(4.314579)
    assert not {*first.names} & {*second.names}
    assert len(first.names) == 2


def test_a_cache_without_bounds_hits_all_that_was_there_before_but_the_last_token() -> None:
    names = array("Q", [1, 2, 3])
    requests = [WorkloadRequest(t, 3 * TRACE_BLOCK_TOKENS, 1, names) for t in (0.0, 1.0)]
    requests.append(WorkloadRequest(2.0, 2 * TRACE_BLOCK_TOKENS + 7, 1, names[:2]))
    assert Workload(tuple(requests), TRACE_BLOCK_TOKENS).infinite_hits() == (2 + 2) * TRACE_BLOCK_TOKENS


def test_swapped_halves_hold_the_same_requests_in_another_order(trace: Workload) -> None:
    swapped = trace.halves_swapped()
    assert sorted(r.names.tobytes() for r in swapped.requests) == sorted(
        r.names.tobytes() for r in trace.requests
    )
    arrivals = [r.arrival_s for r in swapped.requests]
    assert arrivals == sorted(arrivals)
    assert swapped.requests[0].names != trace.requests[0].names


def recorded(*requests: WorkloadRequest) -> str:
    return header_line(16, {"salted": True}) + "".join(
        request_line(each, {"outcome": "ok", "ttft_s": 0.1}) for each in requests
    )


def test_what_was_recorded_is_read_again_by_arrival_from_zero(tmp_path: Path) -> None:
    one = WorkloadRequest(
        7.5, 40, 3, array("Q", [5, 2**64 - 1]), tenant="a", session="s", model="m", slo="fast"
    )
    two = WorkloadRequest(6.25, 16, 0, array("Q", [9]), embeds=True)
    path = tmp_path / "recording.jsonl"
    path.write_text(recorded(one, two))
    found = read_workload(path, Random(1))
    assert found.block_tokens == 16
    assert [each.arrival_s for each in found.requests] == [0.0, 1.25]
    assert (found.requests[0].names, found.requests[0].embeds) == (two.names, True)
    assert found.requests[1] == WorkloadRequest(1.25, 40, 3, one.names, False, "a", "s", "m", "fast")


def test_blocks_that_a_recording_does_not_name_are_shared_with_nobody(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text(recorded(*(WorkloadRequest(0.0, 64, 1, array("Q", [5])) for _ in range(2))))
    first, second = read_workload(path, Random(1)).requests
    assert first.names[0] == second.names[0] == 5
    assert len(first.names) == len(second.names) == 4
    assert len({*first.names, *second.names}) == 7


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "no JSON object"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens: 0 is not"),
        ('{"arrival_s": "x", "prompt_tokens": 1, "output_tokens": 1}', "arrival_s: 'x' is not"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": true}', "output_tokens: True is not"),
        (
            '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_hashes": [-1]}',
            "prefix_hashes: whole numbers",
        ),
    ],
)
def test_a_wrong_line_of_a_recording_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text(header_line(16) + line + "\n")
    with pytest.raises(ConfigError, match=f"line 2: {reason}"):
        open_workload(str(path), Random(1))


def test_a_part_of_a_file_can_be_taken_at_another_pace(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text(recorded(*(WorkloadRequest(float(at), 8, 1, array("Q")) for at in range(10))))
    found = open_workload(f"{path}:start=2,duration=6,speed=2,requests=4", Random(1))
    assert [each.arrival_s for each in found.requests] == [0.0, 0.5, 1.0, 1.5]


def test_a_part_in_which_nothing_arrives_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text(recorded(WorkloadRequest(0.0, 8, 1, array("Q"))))
    with pytest.raises(ConfigError, match="no requests from 5 s to inf s; its last arrival is at 0 s"):
        open_workload(f"{path}:start=5", Random(1))


def test_a_file_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"workload no/such\.jsonl: No such file"):
        open_workload("no/such.jsonl", Random(1))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match="no requests in it"):
        open_workload(str(path), Random(1))


def test_lengths_are_sampled_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1374,44\n")
    found = open_workload(f"synthetic:lengths={path},rate=5,duration=10", Random(1))
    assert {(each.prompt_tokens, each.output_tokens) for each in found.requests} == {(1374, 44)}
