"""Line charts as inline SVG, in the colours of the page that holds them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 28, 16, 30
_TICKS = 4


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line; `color` is one of the page's: a, b, c."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]


def chart(title: str, lines: Sequence[ChartLine], top: float | None = None) -> str:
    """A figure with its lines over one pair of axes, both from zero; `top` None: what the lines need."""
    points = [point for line in lines for point in line.points]
    right = _round_up(max((x for x, _ in points), default=1.0))
    if top is None:
        top = _round_up(max((y for _, y in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / right * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}" fill="currentColor" font-size="11">'
    ]
    for tick in range(_TICKS + 1):
        x, y = right * tick / _TICKS, top * tick / _TICKS
        across, up = at(x, 0.0)[0], at(0.0, y)[1]
        parts.append(f'<path d="M{_LEFT} {up:.1f}H{_WIDTH - _RIGHT}" stroke="var(--line)"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{_label(y)}</text>')
        parts.append(
            f'<text x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_label(x)}</text>'
        )
    for line in lines:
        placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(
            f'<polyline points="{placed}" fill="none" stroke="var(--{line.color})" stroke-width="2"/>'
        )
    names = ", ".join(
        f'<span style="color:var(--{line.color})">{html.escape(line.name)}</span>' for line in lines
    )
    return "".join([*parts, f"</svg><figcaption>{html.escape(title)}: {names}</figcaption></figure>"])


def _round_up(value: float) -> float:
    """The next number of two digits that four ticks divide well."""
    if value <= 0.0:
        return 1.0
    unit = math.pow(10.0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit / 4) * 4 * unit


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
