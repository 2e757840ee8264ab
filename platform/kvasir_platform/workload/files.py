"""Reads recorded workloads. It is the only module of the package that reads files.

Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release, Apache-2.0) has one JSON object per line:
`timestamp` in ms, `input_length`, `output_length` and `hash_ids`, the ids of the prompt's blocks of 512
tokens, equal if the whole prefix is equal. Azure's traces (Azure/AzurePublicDataset, CC-BY) have arrivals and
lengths only: their prompts share nothing. Kvasir's own recordings are described in docs/WORKLOADS.md.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Rng
from kvasir_platform.workload.distributions import SampledLength
from kvasir_platform.workload.generate import generate
from kvasir_platform.workload.parquet import parquet_objects
from kvasir_platform.workload.recording import FORMAT, RecordingReader
from kvasir_platform.workload.requests import MOST_REQUESTS, Workload, WorkloadRequest, block_name
from kvasir_platform.workload.shapes import reshaped
from kvasir_platform.workload.text import FileSource, GeneratedSource, parse_workload

TRACE_BLOCK_TOKENS = 512
"""Tokens of the blocks of Mooncake's trace, and of those that a trace without blocks is given."""
_MOST_LINE = 16 << 20


def open_workload(text: str, rng: Rng) -> Workload:
    """The workload that a command line names. Raises ConfigError for one that does not exist, or is wrong."""
    return load_workload(parse_workload(text), rng, text)


def load_workload(source: GeneratedSource | FileSource, rng: Rng, name: str = "") -> Workload:
    """Generate or read a workload. Raises ConfigError."""
    if isinstance(source, FileSource):
        return _selected(_read(source.path, rng), source, name or str(source.path))
    shape = source.shape
    if source.lengths is not None:
        sampled = _read(source.lengths, rng).requests
        shape = reshaped(
            shape,
            prompt=SampledLength(tuple(each.prompt_tokens for each in sampled)),
            output=SampledLength(tuple(each.output_tokens for each in sampled)),
        )
    return generate(shape, rng, name or source.name)


def read_workload(path: Path, rng: Rng) -> Workload:
    """Read a file in any of the formats. Raises ValueError for an invalid line or an unknown format, and
    OSError."""
    if path.suffix == ".csv":
        return read_azure(path)
    if path.suffix == ".parquet":
        return _recorded(path, enumerate(parquet_objects(path), 1))
    with path.open(encoding="utf-8") as lines:
        first = lines.readline(_MOST_LINE)
    if f'"{FORMAT}"' in first:
        return read_recording(path)
    return read_mooncake(path, rng)


def read_mooncake(path: Path, rng: Rng) -> Workload:
    """Read Mooncake's format. The clock of the published traces ticks every three seconds, about ten requests
    per tick: the time of a request within its tick is drawn from `rng`, in the order of the file. Times of a
    file with an exact clock, most of which occur once, stay what they are. Raise ValueError for an invalid
    line."""
    rows = []
    for number, row in _objects(path):
        try:
            rows.append((row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    times = _spread([row[0] for row in rows], rng)
    requests = []
    for arrival, (_, prompt, output, ids) in zip(times, rows, strict=True):
        names = array("Q", map(block_name, ids[: prompt // TRACE_BLOCK_TOKENS]))
        requests.append(WorkloadRequest(arrival, prompt, max(1, output), names))
    return Workload(tuple(requests), TRACE_BLOCK_TOKENS, path.name)


def read_azure(path: Path) -> Workload:
    """Read Azure's format. Raise ValueError for an invalid line."""
    requests: list[WorkloadRequest] = []
    start: datetime | None = None
    blocks = 0
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                # Seven decimals of a second, of which datetime accepts six.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            start = start or at
            count = prompt // TRACE_BLOCK_TOKENS
            names = array("Q", map(block_name, range(blocks, blocks + count)))
            blocks += count
            requests.append(WorkloadRequest((at - start).total_seconds(), prompt, max(1, output), names))
            _check_count(path, len(requests))
    return Workload(tuple(requests), TRACE_BLOCK_TOKENS, path.name)


def read_recording(path: Path) -> Workload:
    """Read a recording. Raise ValueError for an invalid line."""
    return _recorded(path, _objects(path))


def _recorded(path: Path, objects: Iterable[tuple[int, dict[str, Any]]]) -> Workload:
    reader: RecordingReader | None = None
    for number, row in objects:
        try:
            if reader is None:
                reader = RecordingReader(row)
            else:
                reader.add(row)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if reader is None:
        raise ValueError(f"{path}: empty")
    return reader.workload(path.name)


def _read(path: Path, rng: Rng) -> Workload:
    try:
        found = read_workload(path, rng)
    except OSError as error:
        raise ConfigError(f"workload {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"workload {error}") from error
    if not found.requests:
        raise ConfigError(f"workload {path}: no requests in it")
    return found


def _selected(workload: Workload, source: FileSource, name: str) -> Workload:
    end = source.start_s + source.duration_s
    within = [
        replace(each, arrival_s=each.arrival_s - source.start_s)
        for each in workload.requests
        if source.start_s <= each.arrival_s < end
    ]
    if not within:
        raise ConfigError(
            f"workload {source.path}: no requests from {source.start_s:g} s to {end:g} s; its last arrival "
            f"is at {workload.duration_s:g} s"
        )
    taken = Workload(tuple(within[: source.requests]), workload.block_tokens, name)
    return taken if source.speed == 1.0 else taken.sped_up(source.speed)


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        number = 0
        while line := lines.readline(_MOST_LINE):
            number += 1
            _check_count(path, number - 1)
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: no JSON object")
            yield number, row


def _check_count(path: Path, count: int) -> None:
    if count > MOST_REQUESTS:
        raise ValueError(f"{path}: more than {MOST_REQUESTS:,} requests; split it")


def _spread(times: Sequence[float], rng: Rng) -> list[float]:
    """Move each time to one within its tick, in order. A clock is exact if most ticks have one time."""
    ticks = sorted(set(times))
    if 2 * len(ticks) > len(times):
        return sorted(times)
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    # A gap is longer than a tick: no request arrived within it.
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    widths = dict(zip(ticks, [min(gap, usual) for gap in gaps] + [usual], strict=True)) if ticks else {}
    return sorted(time + rng.random() * widths[time] for time in times)
