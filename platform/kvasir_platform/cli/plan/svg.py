"""A line chart as SVG, for a page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from kvasir_platform.capacity.analysis.curves import CHEAPEST, CostCurve

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 20, 50
_COLOURS = ("#0b5cad", "#c8553d", "#2a7f62", "#8a4fa3", "#b8860b", "#4f6d7a", "#d1477a", "#556b2f")
NAMES = {"ttft": "TTFT", "itl": "ITL"}


def title_of(curve: CostCurve) -> str:
    """Return the title of a curve's chart."""
    return f"Cost against {NAMES[curve.promise]}"


def unit_of(curve: CostCurve) -> tuple[float, str]:
    """Return the factor from seconds, and the label of the axis."""
    factor, unit = (1e3, "ms") if curve.asked_s < 1.0 else (1.0, "s")
    return factor, f"promised {NAMES[curve.promise]} in {unit}"


def chart(curve: CostCurve) -> str:
    """Return the chart of a curve: its promise across, on a logarithmic scale, and dollars for an hour up."""
    points = [point for line in curve.lines for point in line.points]
    if not points:
        return "<p>No plan meets any of these SLOs.</p>"
    across = [curve.asked_s, *(seconds for seconds, _ in points)]
    low, high = math.log(min(across) * 0.95), math.log(max(across) * 1.05)
    most = max(dollars for _, dollars in points) * 1.1 or 1.0

    def place(seconds: float, dollars: float) -> tuple[float, float]:
        x = _LEFT + (math.log(seconds) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)
        return round(x, 1), round(_HEIGHT - _BOTTOM - dollars / most * (_HEIGHT - _TOP - _BOTTOM), 1)

    factor, label = unit_of(curve)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title_of(curve))}" '
        f'id="chart-{curve.promise}" xmlns="http://www.w3.org/2000/svg">'
    ]
    for dollars in _ticks(most):
        _, y = place(curve.asked_s, dollars)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">${dollars:,.4g}</text>')
    for seconds in sorted({seconds for seconds, _ in points}):
        x, _ = place(seconds, 0.0)
        parts.append(
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{seconds * factor:.4g}</text>'
        )
    x, _ = place(curve.asked_s, 0.0)
    parts.append(f'<line class="asked" x1="{x}" y1="{_TOP}" x2="{x}" y2="{_HEIGHT - _BOTTOM}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 6}">dollars for an hour, over a day</text>')
    for number, line in enumerate(curve.lines):
        parts += _line(line.name, [place(*point) for point in line.points], number)
    return "".join([*parts, "</svg>"])


def _line(name: str, places: Sequence[tuple[float, float]], number: int) -> Iterator[str]:
    cheapest = name == CHEAPEST
    colour = "#111" if cheapest else _COLOURS[number % len(_COLOURS)]
    dashes = ' stroke-dasharray="6 4"' if cheapest else ""
    path = " ".join(f"{x},{y}" for x, y in places)
    yield f'<polyline class="line" points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    for x, y in places:
        yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
    y = _TOP + 16 * number + 8
    x = _WIDTH - _RIGHT + 12
    ends = f'x1="{x}" y1="{y - 4}" x2="{x + 16}" y2="{y - 4}"'
    yield f'<line {ends} stroke="{colour}" stroke-width="2"{dashes}/>'
    yield f'<text x="{x + 22}" y="{y}">{escape(name)}</text>'


def _ticks(most: float) -> Iterator[float]:
    step = 10 ** math.floor(math.log10(most))
    step = next(each for each in (step / 5, step / 2, step, 2 * step) if most / each <= 6)
    at = 0.0
    while at <= most:
        yield at
        at += step
