"""Generated workloads: arrivals, lengths, and what prompts share."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice, pairwise
from random import Random
from statistics import fmean, median, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ConfigError
from kvasir.core.quantiles import quantile
from kvasir_platform.workload.arrivals import (
    ArrivalProcess,
    ConstantArrivals,
    DiurnalArrivals,
    GammaArrivals,
    OnOffArrivals,
    PoissonArrivals,
    RampArrivals,
)
from kvasir_platform.workload.distributions import LogNormalLength, Zipf
from kvasir_platform.workload.generate import generate
from kvasir_platform.workload.requests import Workload
from kvasir_platform.workload.shapes import ARRIVAL_KINDS, PRESETS, WorkloadShape, reshaped
from kvasir_platform.workload.text import GeneratedSource, parse_workload, workload_help

SHAPES = st.builds(
    WorkloadShape,
    rate=st.floats(0.5, 8),
    duration=st.floats(1, 15),
    arrivals=st.sampled_from(ARRIVAL_KINDS),
    peak=st.floats(1, 2),
    prompt=st.builds(LogNormalLength, st.integers(1, 100), st.integers(101, 500)),
    output=st.builds(LogNormalLength, st.integers(1, 100), st.integers(101, 500)),
    prefixes=st.integers(0, 5),
    prefix=st.integers(0, 300),
    turns=st.floats(1, 6),
    think=st.floats(0, 5),
    context=st.integers(302, 1_500),
    tenants=st.integers(1, 3),
    block=st.sampled_from([1, 16, 48, 512]),
    embeds=st.booleans(),
)
SEEDS = st.integers(0, 2**32)


def first(process: ArrivalProcess, count: int, seed: int = 1) -> list[float]:
    return list(islice(process.times(Random(seed)), count))


def between(times: list[float], start: float, end: float) -> int:
    return sum(start <= each < end for each in times)


@given(SHAPES, SEEDS)
def test_the_same_seed_gives_the_same_workload(shape: WorkloadShape, seed: int) -> None:
    assert generate(shape, Random(seed)) == generate(shape, Random(seed))


@given(SHAPES, SEEDS)
def test_requests_come_in_order_and_fit_the_context(shape: WorkloadShape, seed: int) -> None:
    requests = generate(shape, Random(seed)).requests
    assert requests
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    for each in requests:
        assert each.prompt_tokens >= 1
        assert each.prompt_tokens + each.output_tokens <= shape.context
        assert each.output_tokens == 0 if shape.embeds else each.output_tokens >= 1
        assert len(each.names) == each.prompt_tokens // shape.block


@given(SHAPES, SEEDS)
def test_equal_names_stand_for_equal_prefixes(shape: WorkloadShape, seed: int) -> None:
    before: dict[int, tuple[int, ...]] = {}
    for each in generate(shape, Random(seed)).requests:
        for place, name in enumerate(each.names):
            assert before.setdefault(name, tuple(each.names[:place])) == tuple(each.names[:place])


@given(SHAPES, SEEDS, st.sampled_from([1, 8, 16, 24, 512]))
def test_other_blocks_share_as_much_as_their_size_allows(shape: WorkloadShape, seed: int, block: int) -> None:
    workload = generate(shape, Random(seed))
    found = workload.with_blocks_of(block)
    for each in found.requests:
        assert len(each.names) == each.prompt_tokens // block
    for (one, other), (old, older) in zip(pairwise(found.requests), pairwise(workload.requests), strict=True):
        common = shared(old.names, older.names) * shape.block
        assert shared(one.names, other.names) == common // block


def shared(one: Any, other: Any) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(SHAPES, SEEDS)
def test_two_workloads_share_nothing(shape: WorkloadShape, seed: int) -> None:
    one, other = (
        {name for each in generate(shape, Random(source)).requests for name in each.names}
        for source in (seed, seed + 1)
    )
    assert not one & other


@pytest.mark.parametrize(
    "process",
    [
        ConstantArrivals(4.0),
        PoissonArrivals(4.0),
        GammaArrivals(4.0, 0.5),
        GammaArrivals(4.0, 3.0),
        OnOffArrivals(4.0, 5.0, 20.0, 0.15),
        DiurnalArrivals(4.0, 1.8, 50.0),
    ],
)
def test_a_process_keeps_its_mean_rate(process: ArrivalProcess) -> None:
    times = first(process, 20_000)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.06)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gamma_arrivals_vary_as_they_are_asked_to(cv: float) -> None:
    gaps = [after - before for before, after in pairwise(first(GammaArrivals(1.0, cv), 30_000))]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_bursts_have_their_multiple_of_the_rate() -> None:
    times = first(OnOffArrivals(10.0, 5.0, 20.0, 0.1), 20_000)
    in_bursts = sum(each % 20.0 < 2.0 for each in times)
    assert in_bursts / len(times) == pytest.approx(0.5, abs=0.02)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    times = [each for each in first(RampArrivals(2.0, 20.0, 1000.0), 12_000) if each < 1000.0]
    assert between(times, 0.0, 100.0) == pytest.approx(290, abs=60)
    assert between(times, 900.0, 1000.0) == pytest.approx(1910, abs=150)


def test_a_day_begins_at_its_lowest() -> None:
    times = first(DiurnalArrivals(1.0, 1.8, 10_000.0), 10_000)
    night, noon = between(times, 0.0, 500.0), between(times, 4_750.0, 5_250.0)
    assert noon > 5 * night


def test_lengths_have_the_median_and_the_percentile_asked_for() -> None:
    rng, lengths = Random(1), LogNormalLength(200, 1000)
    drawn = [lengths.draw(rng) for _ in range(30_000)]
    assert median(drawn) == pytest.approx(200, rel=0.03)
    assert quantile(drawn, 0.95) == pytest.approx(1000, rel=0.05)
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.05)


def test_the_first_prefixes_are_used_most() -> None:
    rng, zipf = Random(1), Zipf(10, 1.0)
    counts = Counter(zipf.draw(rng) for _ in range(20_000))
    total = math.fsum(1 / k for k in range(1, 11))
    for number in range(10):
        assert counts[number] / 20_000 == pytest.approx(1 / (number + 1) / total, abs=0.015)


def test_conversations_have_as_many_turns_as_asked_for() -> None:
    shape = WorkloadShape(rate=20, duration=2_000, turns=4.0, think=2.0, context=10_000_000, block=4096)
    turns = Counter(each.session for each in generate(shape, Random(1)).requests)
    assert fmean(turns.values()) == pytest.approx(4.0, rel=0.05)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    shape = WorkloadShape(rate=2, duration=100, turns=5.0, think=2.0, prefixes=2, prefix=64)
    said: dict[str, tuple[int, int]] = {}
    for each in generate(shape, Random(1)).requests:
        if each.session in said:
            tokens, output = said[each.session]
            assert each.prompt_tokens == tokens + output + 512
        said[each.session] = each.prompt_tokens, each.output_tokens
    assert len(said) > 10


def shared_share(workload: Workload) -> float:
    return workload.infinite_hits() / workload.prompt_tokens


def test_what_the_presets_share() -> None:
    shares = {
        name: shared_share(
            generate(reshaped(each.shape, duration=min(each.shape.duration, 600.0)), Random(1))
        )
        for name, each in PRESETS.items()
    }
    assert shares["synthetic"] == shares["embeddings"] == shares["burst"] == shares["diurnal"] == 0.0
    assert shares["chat"] > 0.7
    assert 0.3 < shares["rag"] < 0.95
    assert shares["agents"] > 0.85


def test_a_text_names_a_preset_and_its_parameters() -> None:
    found = parse_workload("chat:rate=4,duration=300,prompt=50/100,output=7,arrivals=gamma")
    assert isinstance(found, GeneratedSource)
    shape = found.shape
    assert (shape.rate, shape.duration, shape.arrivals, shape.turns) == (4.0, 300.0, "gamma", 5.0)
    assert shape.prompt == LogNormalLength(50, 100)
    assert shape.output.mean == 7.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("chats", "chats is no preset \\(synthetic, chat, rag"),
        ("", "nothing is no preset"),
        ("chat:rate", "'rate' is not of the form key=value"),
        ("chat:speed=2", "no parameter 'speed'; there are rate, duration"),
        ("chat:rate=0", "rate=0: rate is requests per second"),
        ("chat:rate=nan", "rate=nan: rate is"),
        ("chat:rate=1,rate=2", "rate is given twice"),
        ("chat:prompt=9/3", "prompt=9/3: prompt is a request's own prompt tokens: N, or MEDIAN/P95"),
        ("chat:arrivals=weekly", "arrivals is one of constant, poisson"),
        ("chat:duration=1e9", "duration: from 0.001"),
        ("chat:duration=90000000", "about 180,000,000 requests at this rate; at most"),
        ("burst:peak=20", "peak: times share at most 1"),
        ("chat:context=300", "context: at least two tokens more than prefix"),
        ("trace.jsonl:rate=2", "no parameter 'rate'; there are speed, start"),
    ],
)
def test_a_text_that_names_no_workload_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_workload(text)


def test_the_help_names_every_preset_and_fits_a_terminal() -> None:
    lines = workload_help().splitlines()
    assert all(len(line) <= 110 for line in lines)
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in PRESETS)
