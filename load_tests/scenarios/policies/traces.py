"""The traces that the fleets are given: recorded ones, and one of sessions, RAG and agents mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType

from kvasir_platform.workload.distributions import LogNormalLength
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS, read_azure, read_mooncake
from kvasir_platform.workload.generate import generate
from kvasir_platform.workload.requests import Workload, WorkloadRequest
from kvasir_platform.workload.shapes import PRESETS, WorkloadShape, reshaped

MIXED_OF_EACH = 4_000
"""Requests of each kind in the mixed trace."""
_CHANGES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "chat": {"prompt": LogNormalLength(300, 2_000), "turns": 8.0, "context": 32_768},
        "rag": {"prefixes": 4_000, "prefix": 12_288, "zipf": 0.8},
        "agents": {"prompt": LogNormalLength(800, 4_000), "think": 5.0},
    }
)
MIXED: Mapping[str, WorkloadShape] = MappingProxyType(
    {
        name: reshaped(PRESETS[name].shape, rate=1.0, duration=2.0 * MIXED_OF_EACH, **changes)
        for name, changes in _CHANGES.items()
    }
)
"""The presets with more and longer documents, messages and results of tools, as the caches of these workers
hold what the presets share; each at one request per second."""


@cache
def trace_of(path: Path | None, requests: int | None, swapped: bool, seed: int) -> Workload:
    """Read a recorded trace, or generate the mixed one if there is no path. `requests` are its first ones."""
    if path is None:
        trace = mixed(seed)
    else:
        trace = read_azure(path) if path.suffix == ".csv" else read_mooncake(path, Random(seed))
    if requests is not None:
        trace = trace.first(requests)
    return trace.halves_swapped() if swapped else trace


def mixed(seed: int, of_each: int = MIXED_OF_EACH) -> Workload:
    """Sessions, RAG and agents at a time, in blocks of TRACE_BLOCK_TOKENS."""
    rng = Random(seed)
    requests: list[WorkloadRequest] = []
    for kind, shape in MIXED.items():
        drawn = generate(reshaped(shape, requests=of_each, block=TRACE_BLOCK_TOKENS), rng)
        requests += (
            replace(each, session=each.session and f"{kind}-{each.session}") for each in drawn.requests
        )
    requests.sort(key=lambda each: each.arrival_s)
    return Workload(tuple(requests), TRACE_BLOCK_TOKENS, "mixed")


def distinct_blocks(trace: Workload) -> int:
    """The trace's working set: what a cache must hold to miss nothing twice."""
    return len({name for each in trace.requests for name in each.names})


def longest_blocks(trace: Workload) -> int:
    """What the request with the longest prompt and output needs on a device."""
    longest = max(each.prompt_tokens + each.output_tokens for each in trace.requests)
    return -(-longest // trace.block_tokens) + 1


def median_prompt(trace: Workload) -> int:
    """The median length of prompts, in tokens."""
    return sorted(each.prompt_tokens for each in trace.requests)[len(trace.requests) // 2]
