"""Charts of lines and bars: what they show, and their SVG in the colours of the page.

`kvasir_platform.reports.png` draws the same lines as a PNG.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 460, 230, 58, 22, 42, 14
_TALL = _HEIGHT - _BOTTOM - _TOP
_COLOURS = tuple(f"--c{number}" for number in range(1, 9))
_LABEL_WIDTH = 30
_MOST_MARKERS = 24


@dataclass(frozen=True, slots=True)
class PlottedLine:
    """One line: a name, and points (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False

    @property
    def marked(self) -> bool:
        """Whether the points are few enough to be marked."""
        return len(self.points) <= _MOST_MARKERS


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over one pair of axes, y from 0; values above `most` leave it. `mark` is an x to point out."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[PlottedLine, ...]
    most: float | None = None
    logarithmic: bool = False
    mark: float | None = None

    def points_of(self, line: PlottedLine) -> tuple[tuple[float, float], ...]:
        """Return the points that can be drawn: those that are numbers, and above 0 on a logarithmic axis."""
        return tuple(
            (x, y) for x, y in line.points if math.isfinite(x + y) and (x > 0.0 or not self.logarithmic)
        )


def line_chart(chart: LineChart) -> str:
    """Return the figure, nothing without points."""
    points = [point for line in chart.lines for point in chart.points_of(line)]
    if not points:
        return ""
    every = sorted({x for x, _ in points} | ({chart.mark} if chart.mark is not None else set()))
    left, right = every[0], every[-1]
    highest = max(y for _, y in points)
    top = _round_up(highest if chart.most is None else min(highest, chart.most))

    def across(x: float) -> float:
        part = (
            math.log(x / left) / (math.log(right / left) or 1.0)
            if chart.logarithmic
            else (x - left) / (right - left or 1.0)
        )
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def place(x: float, y: float) -> tuple[float, float]:
        return across(x), _HEIGHT - _BOTTOM - min(y, top * 1.05) / top * _TALL

    parts = list(_grid(top))
    at = -math.inf
    for x in every if len(every) <= 9 else _ticks(left, right):
        if across(x) - at >= _LABEL_WIDTH:
            at = across(x)
            parts.append(_text(at, _HEIGHT - _BOTTOM + 14, _number(x), "middle"))
    if chart.mark is not None:
        x = across(chart.mark)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for number, line in enumerate(chart.lines):
        places = [place(*point) for point in chart.points_of(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour, dashes = _colour(number), ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        if line.marked:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in places]
    return _figure(chart.title, chart.x_label, chart.y_label, parts, [line.name for line in chart.lines])


def bar_chart(
    title: str, y_label: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """Return the figure of bars: of each of `names`, one for each group."""
    values = [value for _, each in groups for value in each if math.isfinite(value)]
    top = _round_up(max(values, default=0.0))
    room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(names))
    wide = min(46.0, room * 0.8 / max(1, len(groups)))
    parts = list(_grid(top))
    for number, name in enumerate(names):
        middle = _LEFT + room * (number + 0.5)
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 14, name, "middle"))
        for group, (_, each) in enumerate(groups):
            value = each[number] if math.isfinite(each[number]) else 0.0
            high = value / top * _TALL
            x = middle + (group - len(groups) / 2) * wide
            parts.append(
                f'<rect x="{x:.1f}" y="{_HEIGHT - _BOTTOM - high:.1f}" width="{wide - 2:.1f}" '
                f'height="{high:.1f}" fill="{_colour(group)}"/>'
            )
            parts.append(_text(x + wide / 2 - 1, _HEIGHT - _BOTTOM - high - 3, _number(value), "middle"))
    return _figure(title, "", y_label, parts, [name for name, _ in groups])


def _figure(title: str, x_label: str, y_label: str, parts: Sequence[str], names: Sequence[str]) -> str:
    key = "".join(
        f'<span><s style="background: {_colour(number)}"></s>{escape(name)}</span>'
        for number, name in enumerate(names)
        if name
    )
    labels = _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, "middle")
    whole = escape(f"{title}, {y_label}")
    return (
        f'<figure><figcaption>{whole}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{whole}">{"".join(parts)}{labels}</svg><div class="key">{key}</div></figure>'
    )


def _grid(top: float) -> Iterator[str]:
    for value in _ticks(0.0, top):
        y = _HEIGHT - _BOTTOM - value / top * _TALL
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 5, y + 4, _number(value), "end")


def _colour(number: int) -> str:
    return f"var({_COLOURS[number % len(_COLOURS)]})"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _step(span: float) -> float:
    """Return a round number that divides `span` into three to six parts."""
    power = 10.0 ** math.floor(math.log10(span))
    return next(step for step in (power / 5, power / 2, power, 2 * power) if span / step <= 6)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    step = _step(high - low)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _round_up(value: float) -> float:
    """Return where an axis from 0 ends that holds `value`."""
    if value <= 0.0:
        return 1.0
    step = _step(value)
    return math.ceil(value / step - 1e-9) * step
