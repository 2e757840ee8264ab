"""The report rows of a day."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from load_tests.report import Row, median
from load_tests.scenarios.autoscale.days import (
    BOUNDS,
    HPA,
    KEEP,
    LEVEL,
    MOST,
    OURS,
    Outcome,
    kind,
    trace_shapes,
)

MOST_STARTS = 2.0
"""Of HPA's starts, for the same replica-hours."""


def rows_of(day: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> list[Row]:
    """The rows of a day, from the results by scaler and seed. A rival that misses the 99 % with one seed is
    not used as the peer."""
    mine = outcomes[OURS]
    hours = {who: median([each.hours for each in found.values()]) for who, found in outcomes.items()}
    peers = [who for who in outcomes if who != OURS and all(each.good for each in outcomes[who].values())]
    best = min(peers, key=lambda who: hours[who][0], default=None)
    value, spread = hours[OURS]
    row = Row(f"GPU-hours, {day}, ours", value, "replica-h", "lower", spread=spread, note=_story(mine))
    if best is not None:
        peer = hours[best][0]
        note = f"the best rival is {best}; {row.note}"
        row = replace(row, peer=peer, ratio=value / peer, target_ratio=1.0, note=note)
    rows = [row]
    for who in sorted(set(outcomes) - {OURS}, key=lambda who: hours[who][0]):
        theirs, spread = hours[who]
        row = Row(f"GPU-hours, {day}, {who}", theirs, "replica-h", "lower", spread=spread)
        if who in peers:
            row = replace(row, peer=value, ratio=theirs / value, note=_story(outcomes[who]))
        else:
            row = replace(row, note=f"{_failure(outcomes[who])}; {_story(outcomes[who])}")
        rows.append(row)
    kept = [100 * each.kept for each in mine.values()]
    rows += [
        Row(
            f"SLO kept, {day}, ours",
            min(kept),
            "%",
            "higher",
            target=100 * KEEP,
            spread=(min(kept), max(kept)),
            note="the minimum of the seeds",
        ),
        _over_seeds(
            f"most workers alive, {day}, ours",
            [each.most for each in mine.values()],
            max,
            target=MOST,
            note="the maximum of the seeds, including starting and draining workers",
        ),
        _starts(day, outcomes),
        _over_seeds(
            f"planning a day, {day}, ours",
            [each.planning_s for each in mine.values()],
            statistics.median,
            unit="CPU s",
            note="every 15 s, including the simulated fleet's observation",
        ),
    ]
    return [replace(row, seeds=tuple(sorted(mine))) for row in rows]


def _starts(day: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> Row:
    """Starts, compared with those of HPA. That ours take no more replica-hours for them is the target of the
    first row."""
    mine, theirs = outcomes[OURS], outcomes.get(HPA)
    others = "; ".join(
        f"{who} {statistics.median(each.starts for each in outcomes[who].values()):.0f}"
        for who in sorted(set(outcomes) - {OURS})
    )
    row = _over_seeds(
        f"starts a day, {day}, ours", [each.starts for each in mine.values()], statistics.median, note=others
    )
    if theirs is None:
        return row
    hours = [each.hours / theirs[seed].hours for seed, each in mine.items()]
    return replace(
        row,
        peer=statistics.median(each.starts for each in theirs.values()),
        ratio=statistics.median(each.starts / max(1, theirs[seed].starts) for seed, each in mine.items()),
        target_ratio=MOST_STARTS,
        note=f"the peer is hpa; ours are {min(hours):.2f} to {max(hours):.2f} of its hours; {others}",
    )


def _over_seeds(
    name: str,
    values: Sequence[float],
    chosen: Callable[[Sequence[float]], float],
    *,
    unit: str = "",
    target: float | None = None,
    note: str,
) -> Row:
    spread = min(values), max(values)
    return Row(name, chosen(values), unit, "lower", target=target, spread=spread, note=note)


def _story(found: Mapping[int, Outcome]) -> str:
    parts = (
        f"seed {seed}: {each.hours:.0f} h, {100 * each.kept:.2f} % "
        f"({each.setting}; at most {each.most} alive)"
        for seed, each in sorted(found.items())
    )
    return "; ".join(parts)


def _failure(found: Mapping[int, Outcome]) -> str:
    missed = {seed: each for seed, each in sorted(found.items()) if not each.good}
    best = max(missed.values(), key=lambda each: each.kept)
    seeds = ", ".join(map(str, missed))
    return (
        f"no setting keeps {100 * KEEP:.0f} % with seed {seeds} (the best there {100 * best.kept:.2f} %): "
        "no peer"
    )


def facts(path: Path) -> str:
    """Description of the simulation."""
    replica, shapes = kind(), trace_shapes(path)
    prompt = statistics.fmean(each.prompt for each in shapes)
    computed = statistics.fmean(each.computed for each in shapes)
    took = statistics.fmean(replica.prefill_s(each) for each in shapes)
    return (
        f"Prompts of {prompt:,.0f} tokens on average, {computed:,.0f} of them to compute in {took:.2f} s; "
        f"a replica is LLaMA2-70B on eight A800 with {replica.kv_tokens:,} tokens of KV, and starts in "
        f"{replica.start_s:.0f} s; promise: TTFT {LEVEL.ttft_s:g} s and mean ITL {LEVEL.itl_s:g} s; "
        f"prefill 1 to {BOUNDS['prefill'][1]}, decode 1 to {BOUNDS['decode'][1]} replicas for everybody. A "
        "rival's settings: its figure for prefill, for decode, and how long it waits before it shrinks"
    )
