"""Pages: of a run, with a player of queues, batches, KV and transfers, and of a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from kvasir_platform.cli.sim.page_style import SCRIPT, STYLE
from kvasir_platform.reports.document import charts as side_by_side
from kvasir_platform.reports.document import document
from kvasir_platform.sim.server.timeline import Timeline, TimelineSample

Cards = Sequence[tuple[str, str]]

_KEY = (
    ("--bad", "waits"),
    ("--c2", "prompts that are computed or moved"),
    ("--c1", "streams"),
    ("--c3", "KV memory in use"),
    ("--c4", "KV between workers, and events"),
)
_NOW = (
    ("queued", "waiting at the router"),
    ("arrived", "arrived"),
    ("ended", "ended"),
    ("metnow", "met the SLO"),
    ("refusednow", "refused"),
    ("moving", "transfers"),
)


def cards(each: Cards) -> str:
    """Return figures side by side."""
    parts = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in each
    )
    return f'<div class="cards">{"".join(parts)}</div>'


def run_page(title: str, about: str, figures: Cards, tables: Sequence[str], timeline: Timeline) -> str:
    """Return the page of a run; `tables` are HTML."""
    now = "".join(f'<span><b id="{name}">0</b> {label}</span>' for name, label in _NOW)
    key = "".join(f'<span><s style="background: var({colour})"></s>{text}</span>' for colour, text in _KEY)
    speeds = "".join(
        f'<option value="{speed}"{" selected" if speed == 1 else ""}>{speed:g}x</option>'
        for speed in (0.25, 0.5, 1, 2, 4)
    )
    body = (
        f'<h1>{escape(title)}</h1><p class="soft">{escape(about)}</p>{cards(figures)}'
        '<h2>The run</h2><p class="soft">Space plays and pauses, the arrow keys step, a click on the curve '
        "seeks. The curve shows what runs and what waits on all workers.</p>"
        '<div class="player"><button id="play">Play</button><select id="speed" title="speed">'
        f'{speeds}</select><input id="seek" type="range" min="0" value="0" title="time">'
        f'<span id="time"></span></div><canvas id="curve"></canvas><div class="key">{now}</div>'
        f'<div id="marks"></div><div class="key">{key}</div>'
        '<div id="stage"><svg id="links"></svg><div id="pools"></div></div>'
        f'{"".join(tables)}<script type="application/json" id="data">{_data(timeline)}</script>'
    )
    return document(title, body, style=STYLE, script=SCRIPT)


def compare_page(title: str, about: str, charts: Sequence[str], tables: Sequence[str]) -> str:
    """Return the page of a comparison; `charts` and `tables` are HTML."""
    head = f'<h1>{escape(title)}</h1><p class="soft">{escape(about)}</p>'
    return document(title, f"{head}{side_by_side(charts)}{''.join(tables)}")


def _data(timeline: Timeline) -> str:
    names = list(timeline.pools)
    numbers = {name: number for number, name in enumerate(names)}
    data = {
        "step": round(timeline.step_s, 3),
        "workers": [[name, timeline.pools[name]] for name in names],
        "frames": [_frame(each, names) for each in timeline.frames],
        "transfers": [
            [round(each.begin_s, 3), round(each.end_s, 3), numbers.get(each.source, -1), numbers[each.target]]
            for each in timeline.transfers
            if each.target in numbers
        ],
        "events": [[round(each.at_s, 2), each.text] for each in timeline.events],
    }
    # Text must not end the element that holds it.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _frame(frame: TimelineSample, names: Sequence[str]) -> dict[str, object]:
    return {
        "t": round(frame.at_s, 3),
        "q": frame.queued,
        "a": frame.arrived,
        "e": frame.ended,
        "m": frame.met,
        "r": frame.refused,
        "w": [
            None
            if (worker := frame.workers.get(name)) is None
            else [worker.state, worker.waiting, worker.prefilling, worker.decoding, round(100 * worker.kv)]
            for name in names
        ],
    }
