"""Computes the rows of the report from samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from load_tests.report import Row, median
from load_tests.scenarios.gateway.bodies import MEAN_OUTPUT, MEAN_PROMPT, SIZES, WARM
from load_tests.scenarios.gateway.measure import (
    DELTAS_A_MESSAGE,
    WHOLE_STEPS,
    Samples,
    chunk_name,
    whole_name,
)
from load_tests.scenarios.gateway.pacing import TOKENS_PER_S
from load_tests.scenarios.gateway.systems import AS_UP

KVASIR = "kvasir"
AIMED = (KVASIR, AS_UP)
"""The systems with targets: one pool without TLS, as the floor of ours, and what a user gets."""
ROUTERS = ("sglang-router", "vllm-router", "dynamo")
"""Peers that choose a worker by its cached blocks."""
_TARGETS = {"100 B": 0.20, "16 KiB": 0.45, "128 KiB": 2.5, "128 KiB, warm": 0.6}
_CHUNK_TARGETS = {8: 22.0, 32: 12.0, 128: 12.0}
_TTFT_TARGETS_MS = {KVASIR: 0.5, AS_UP: 1.0}
RSS_MB, BLOCK_BYTES = 250.0, 48.0


def cheapest(samples: Samples, what: str, of: str) -> tuple[str, float] | None:
    """The routing peer with the lowest median cost in a measurement."""
    found = [(statistics.median(values), name) for name in ROUTERS if (values := samples.cpu(name, what, of))]
    return (min(found)[1], min(found)[0]) if found else None


def request_rows(samples: Samples, systems: Sequence[str]) -> list[Row]:
    """CPU of a request, by prompt size."""
    rows = []
    for size in (*SIZES, WARM):
        for name in systems:
            values = [each * 1000 for each in samples.cpu(name, size.name, "count")]
            if not values:
                continue
            value, spread = median(values)
            own, aimed = name == KVASIR, name in AIMED
            best = cheapest(samples, size.name, "count") if aimed else None
            peer = best[1] * 1000 if best else None
            note = f"{samples.of(name, size.name)[0]['connections']} connections, each one request at a time"
            if best:
                note += f"; peer: {best[0]}, the cheapest that routes"
            rows.append(
                Row(
                    f"request, {size.name}" if own else f"request, {size.name}, {name}",
                    value,
                    "CPU s/1k",
                    "lower",
                    _TARGETS[size.name] if aimed else None,
                    peer,
                    value / peer if peer else None,
                    spread=spread,
                    note=note if aimed else "",
                )
            )
    for name in systems:
        values = [each * 1000 for each in samples.cpu(name, "ttft", "count")]
        if values:
            value, spread = median(values)
            own = name == KVASIR
            rows.append(
                Row(
                    "request, 100 B, alone" if own else f"request, 100 B, alone, {name}",
                    value,
                    "CPU s/1k",
                    "lower",
                    spread=spread,
                    note="one connection, one token: no message, loop iteration or wake-up is shared"
                    if own
                    else "",
                )
            )
    return rows


def chunk_rows(samples: Samples, systems: Sequence[str]) -> list[Row]:
    """CPU of a token that a client received."""
    rows = []
    for deltas in DELTAS_A_MESSAGE:
        best = cheapest(samples, chunk_name(deltas), "tokens")
        for name in systems:
            rows += _chunk_row(samples, name, deltas, best if name in AIMED else None)
    return rows


def chunk_title(deltas: int) -> str:
    """The row of a token with that many deltas per message, or at the same time from a worker of a peer."""
    return f"chunk, {deltas} deltas a message"


def _chunk_row(samples: Samples, name: str, deltas: int, best: tuple[str, float] | None) -> list[Row]:
    what = chunk_name(deltas)
    found = samples.of(name, what)
    if not found:
        return []
    value, spread = median([each * 1e6 for each in samples.cpu(name, what, "tokens")])
    rate = statistics.median(each["tokens"] / each["wall_s"] for each in found)
    merged = statistics.median(each["tokens"] / max(1, each["events"]) for each in found)
    streams = found[0]["streams"]
    note = (
        f"{streams} streams × {rate / streams:.0f} of {TOKENS_PER_S:.0f} tok/s, {merged:.2f} tokens an event"
    )
    if "deltas_a_message" in found[0]:
        note += f", {statistics.median(each['deltas_a_message'] for each in found):.1f} deltas a message"
    if best:
        note += f"; peer: {best[0]}"
    title = chunk_title(deltas)
    return [
        Row(
            title if name == KVASIR else f"{title}, {name}",
            value,
            "CPU µs",
            "lower",
            _CHUNK_TARGETS.get(deltas) if name in AIMED else None,
            best[1] * 1e6 if best else None,
            value / (best[1] * 1e6) if best else None,
            spread=spread,
            note=note,
        )
    ]


def whole_rows(samples: Samples, systems: Sequence[str]) -> list[Row]:
    """CPU of a whole request of the mean size, from its first byte to its last token."""
    rows = []
    for deltas in WHOLE_STEPS:
        what = whole_name(deltas)
        best = cheapest(samples, what, "requests")
        for name in systems:
            values = [each * 1000 for each in samples.cpu(name, what, "requests")]
            if not values:
                continue
            value, spread = median(values)
            own = name == KVASIR
            peer = best[1] * 1000 if name in AIMED and best else None
            found = samples.of(name, what)
            note = (
                f"{MEAN_PROMPT:,} tokens in, {MEAN_OUTPUT} out; {found[0]['streams']} at a time, "
                f"{statistics.median(each['requests'] / each['wall_s'] for each in found):.0f} a second"
            )
            rows.append(
                Row(
                    f"whole request, {deltas} streams a step" + ("" if own else f", {name}"),
                    value,
                    "CPU s/1k",
                    "lower",
                    peer=peer,
                    ratio=value / peer if peer else None,
                    spread=spread,
                    note=note + (f"; peer: {best[0]}, the cheapest that routes" if peer and best else ""),
                )
            )
    return rows


def ttft_rows(samples: Samples, systems: Sequence[str]) -> list[Row]:
    """TTFT added to that of a worker without a gateway; the difference is taken within each round."""
    direct = samples.of("direct", "ttft")
    added = {}
    for name in systems:
        pairs = zip(samples.of(name, "ttft"), direct, strict=False)
        if values := [(each["ttft_s"] - bare["ttft_s"]) * 1e3 for each, bare in pairs]:
            added[name] = median(values)
    routing = [(added[name][0], name) for name in ROUTERS if name in added]
    rows = []
    for name, (value, spread) in added.items():
        own, aimed = name == KVASIR, name in AIMED
        peer = min(routing) if aimed and routing else None
        rows.append(
            Row(
                "ttft, added" if own else f"ttft, added, {name}",
                value,
                "ms",
                "lower",
                _TTFT_TARGETS_MS.get(name),
                peer[0] if peer else None,
                value / peer[0] if peer and peer[0] > 0 else None,
                spread=spread,
                note="a blocking client with the kernel's defaults, one request at a time; medians"
                + (f"; peer: {peer[1]}" if peer else "")
                if aimed
                else "",
            )
        )
    return rows


def rss_rows(name: str, held: int, resident: tuple[int, int, int], tree_mb: float, note: str) -> list[Row]:
    """Memory of the router process: before any block is reported, after all are, and after the run."""
    before, filled, after = resident
    end = "" if name == KVASIR else f", {name}"
    return [
        Row(
            f"rss, after the run{end}",
            after / 1e6,
            "MB",
            "lower",
            RSS_MB + BLOCK_BYTES * held / 1e6,
            note=f"{held:,} blocks reported before the run, and those of its prompts in it; {note}",
        ),
        Row(f"rss, before any block{end}", before / 1e6, "MB", "lower"),
        Row(
            f"rss, of a block{end}",
            (filled - before) / held,
            "B",
            "lower",
            BLOCK_BYTES,
            note=f"growth of the router process while {held:,} blocks of {note.partition(';')[0]} came in",
        ),
        Row(
            f"rss, with its child processes{end}",
            tree_mb,
            "MB",
            "lower",
            note="proportional set size, which counts shared pages once",
        ),
    ]


def without(rows: Sequence[Row], beginning: str | tuple[str, ...]) -> list[Row]:
    """Return the rows of a report whose names begin otherwise; they keep the run that measured them."""
    return [row for row in rows if not row.name.startswith(beginning)]
