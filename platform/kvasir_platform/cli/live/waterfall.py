"""A request's timeline as a waterfall of text: pure."""

from __future__ import annotations

from typing import Any

from kvasir_platform.cli.common.output import milliseconds, table

WIDTH = 80
_LEAST_BAR = 10
Timeline = dict[str, Any]
"""kvasir_platform.gateway.openai.schema.operation.RequestTimeline as JSON."""


def waterfall(timeline: Timeline, width: int = WIDTH) -> list[str]:
    """Return lines of at most about `width` characters: what the request was, then a bar for each phase."""
    return [*_head(timeline), "", *_bars(timeline, width)]


def _head(timeline: Timeline) -> list[str]:
    outcome = timeline["outcome"] or f"running ({timeline['running']})"
    parts = [outcome, timeline["model"]]
    parts += [f"tenant {timeline['tenant']}"] if timeline["tenant"] else []
    met = {True: "met", False: "missed"}.get(timeline["slo_met"])
    parts.append(f"SLO {timeline['slo']} {met}" if met else f"SLO {timeline['slo']}")
    counts = [f"{timeline['prompt_tokens']:,} tokens in ({timeline['cached_tokens']:,} cached)"]
    counts.append(f"{timeline['output_tokens']:,} out")
    counts += [f"{timeline['retries']:,} retries"] if timeline["retries"] else []
    counts += [f"{timeline['migrations']:,} migrations"] if timeline["migrations"] else []
    times = [f"{milliseconds(timeline['total_s'])} in all"]
    times += [f"TTFT {milliseconds(timeline['ttft_s'])}"] if timeline["ttft_s"] is not None else []
    times += [f"mean ITL {milliseconds(timeline['itl_s'])}"] if timeline["itl_s"] is not None else []
    return [f"{timeline['request_id']}: {', '.join(parts)}", f"{', '.join(times)}; {', '.join(counts)}"]


def _bars(timeline: Timeline, width: int) -> list[str]:
    phases, total = timeline["phases"], timeline["total_s"]
    if not phases or total <= 0.0:
        return ["it has just arrived"]
    rows = [
        (
            phase["phase"],
            milliseconds(phase["start_s"]),
            milliseconds(phase["end_s"] - phase["start_s"]),
            phase["worker"] or "router",
        )
        for phase in phases
    ]
    heads = ("PHASE", "FROM", "TOOK", "WHERE")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    room = max(_LEAST_BAR, width - sum(widths) - 2 * len(widths))
    bars = [_bar(phase["start_s"] / total, phase["end_s"] / total, room) for phase in phases]
    cells = [(*row, bar) for row, bar in zip(rows, bars, strict=True)]
    return table((*heads, ""), cells, (1, 2)).splitlines()


def _bar(begin: float, end: float, room: int) -> str:
    """Return a bar of at least one character within `room`."""
    first = min(room - 1, int(begin * room))
    last = max(first + 1, round(end * room))
    return " " * first + "#" * (last - first)
