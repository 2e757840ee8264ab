"""Charts as SVG for pages that load nothing: lines and bars, in the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 230, 52, 42, 14
COLOURS = ("--c1", "--c2", "--c3", "--c4")


@dataclass(frozen=True, slots=True)
class PlottedLine:
    """One line: a name, and points (x, y). Points that are not numbers are left out."""

    name: str
    points: tuple[tuple[float, float], ...]


def line_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[PlottedLine], *, most: float | None = None
) -> str:
    """Return a chart of lines from y = 0 on; values above `most` leave it."""
    points = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    top = min(top, most) if most is not None else top
    span = right - left or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - left) / span * (_WIDTH - _LEFT - 14)
        return across, _HEIGHT - _BOTTOM - min(y, top * 1.05) / top * (_HEIGHT - _BOTTOM - _TOP)

    parts = [_grid(place(left, y)[1], _number(y)) for y in (0.0, top / 2, top)]
    every = sorted({x for x, _ in points})
    for x in every if len(every) <= 9 else (left, (left + right) / 2, right):
        parts.append(_text(place(x, 0.0)[0], _HEIGHT - _BOTTOM + 14, _number(x), "middle"))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        kept = [place(x, y) for x, y in line.points if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in kept)
        parts.append(f'<polyline points="{path}" fill="none" stroke="var({colour})" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="var({colour})"/>' for x, y in kept]
    return _figure(title, x_label, y_label, parts, [line.name for line in lines])


def bar_chart(
    title: str, y_label: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """Return bars: of each of `names`, one for each group."""
    values = [value for _, each in groups for value in each if math.isfinite(value)]
    top = max(values, default=1.0) or 1.0
    room = (_WIDTH - _LEFT - 14) / max(1, len(names))
    wide = min(46.0, room * 0.8 / max(1, len(groups)))
    tall = _HEIGHT - _BOTTOM - _TOP
    parts = [_grid(_HEIGHT - _BOTTOM - share * tall, _number(share * top)) for share in (0.0, 0.5, 1.0)]
    for number, name in enumerate(names):
        middle = _LEFT + room * (number + 0.5)
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 14, name, "middle"))
        for group, (_, each) in enumerate(groups):
            value = each[number] if math.isfinite(each[number]) else 0.0
            high = value / top * tall
            x = middle + (group - len(groups) / 2) * wide
            colour = COLOURS[group % len(COLOURS)]
            parts.append(
                f'<rect x="{x:.1f}" y="{_HEIGHT - _BOTTOM - high:.1f}" width="{wide - 2:.1f}" '
                f'height="{high:.1f}" fill="var({colour})"/>'
            )
            parts.append(_text(x + wide / 2 - 1, _HEIGHT - _BOTTOM - high - 3, _number(value), "middle"))
    return _figure(title, "", y_label, parts, [name for name, _ in groups])


def _figure(title: str, x_label: str, y_label: str, parts: Sequence[str], names: Sequence[str]) -> str:
    key = "".join(
        f'<span><s style="background: var({COLOURS[number % len(COLOURS)]})"></s>{escape(name)}</span>'
        for number, name in enumerate(names)
        if name
    )
    labels = _text(_WIDTH / 2, _HEIGHT - 8, x_label, "middle")
    title = f"{title}, {y_label}"
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}{labels}</svg><div class="key">{key}</div></figure>'
    )


def _grid(y: float, label: str) -> str:
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 5, y + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
