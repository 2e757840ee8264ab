"""Pages of reports: one style, light and dark, without an address of anything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { --page: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --card: #f6f8fa;
  --c1: #2563a8; --c2: #c2570c; --c3: #1a7f4b; --c4: #8250df; --c5: #9a6700; --c6: #4f6d7a; --c7: #bf3989;
  --c8: #556b2f; --good: #1a7f37; --bad: #b3261e; --track: #e6eaef; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9aa4af;
  --line: #30363d; --card: #161b22; --c1: #6cb0f5; --c2: #f0883e; --c3: #4cc38a; --c4: #bc8cff;
  --c5: #d4a72c; --c6: #9db4c0; --c7: #f778ba; --c8: #a5c261; --good: #56d364; --bad: #ff7b72;
  --track: #262c34; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 78rem; padding: 0 1rem;
  color: var(--ink); background: var(--page); }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 1.8rem 0 .4rem; }
p { margin: .3rem 0 .8rem; } a { color: var(--c1); } .soft { color: var(--soft); }
.note { font-weight: 600; } .pass { color: var(--good); } .fail { color: var(--bad); font-weight: 600; }
.skip { color: var(--soft); }
table { border-collapse: collapse; font-size: .87rem; margin: .4rem 0 1rem; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .words th, .words td { text-align: left; vertical-align: top; }
th { background: var(--card); font-weight: 600; }
pre { background: var(--card); padding: 1rem; overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts figure { margin: 0; flex: 1 1 24rem; max-width: 38rem; }
figcaption { font-size: .87rem; font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: 1rem; font-size: .8rem; color: var(--soft); }
.key s { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .3rem; }
"""


def document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole page; `style` is added to that of all pages."""
    scripts = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{_STYLE}{style}</style></head><body>{body}{scripts}</body></html>\n"
    )


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: bool = False,
    classes: Sequence[str] | None = None,
) -> str:
    """Return a table of figures, whose first column is text, or with `words` all of them. `classes` has that
    of each row."""
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body.append(f'<tr class="{classes[number]}">{cells}</tr>' if classes else f"<tr>{cells}</tr>")
    kind = ' class="words"' if words else ""
    return f"<table{kind}><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def charts(each: Iterable[str]) -> str:
    """Return charts side by side, where the page is wide enough."""
    return f'<div class="charts">{"".join(each)}</div>'
