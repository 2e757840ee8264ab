"""The page of the showcase: seven experiments, each with its question, finding, charts and table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvasir_platform.cli.showcase.bench import ShowcaseResult
from kvasir_platform.reports.document import charts, document, table

_ABOUT = (
    "Seven experiments in virtual time, on the production router and on engines whose steps take what the "
    "performance model computes from data sheets. SLO: TTFT of 1 s and 50 ms per token. Requests come from "
    "presets of kvasir sim, with seed 1; prices are list prices of GPUs for an hour."
)


def showcase_page(experiments: Sequence[ShowcaseResult]) -> str:
    """Return the page."""
    links = " · ".join(f'<a href="#{each.name}">{escape(each.title)}</a>' for each in experiments)
    parts = [
        f'<h1>What an LLM server does</h1><p class="soft">{escape(_ABOUT)}</p><p>{links}</p>',
        *(_section(each) for each in experiments),
    ]
    return document("What an LLM server does", "".join(parts))


def _section(each: ShowcaseResult) -> str:
    return (
        f'<section id="{each.name}"><h2>{escape(each.title)}</h2><p class="soft">{escape(each.question)}</p>'
        f'<p class="finding">{escape(each.finding)}</p>{charts(each.charts)}'
        f"{table(each.head, each.rows)}</section>"
    )
