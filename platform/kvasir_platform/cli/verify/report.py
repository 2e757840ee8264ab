"""The report of `kvasir verify`: one JSON file, and one HTML page without external resources."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvasir_platform.cli.verify.curves import LoadPoint
from kvasir_platform.cli.verify.run import Verification
from kvasir_platform.cli.verify.score_file import SUFFIX, write_scores
from kvasir_platform.cli.verify.scores import QualityFigures

_WIDTH, _HEIGHT, _MARGIN = 360, 200, 44
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .75rem;border-bottom:1px solid #8884;"
    "text-align:left}.pass{color:#1a7f37}.fail{color:#cf222e;font-weight:600}.skip{color:#6e7781}"
    "svg{margin:0 1rem 1rem 0}:root{color-scheme:light dark}"
)


def as_json(found: Verification) -> dict[str, Any]:
    """Return the report as JSON values. Rates of transfers are in bytes per second."""
    quality = found.options.quality
    plain = replace(found, options=replace(found.options, quality=None), scored=None)
    shown = asdict(plain) | {"passed": found.passed}
    del shown["scored"], shown["options"]["quality"]
    if quality is not None:
        shown["options"]["quality_tokens"] = quality.tokens
        shown["options"]["quality_limits"] = asdict(quality.limits)
    link = found.options.link_bytes_per_s
    for values, sample in zip(shown["transfers"], found.transfers, strict=True):
        values["bytes_per_s"] = sample.bytes_per_s
        values["link_share"] = sample.bytes_per_s / link if link else None
    for values, each in zip(shown["predictions"], found.predictions, strict=True):
        values["error"] = each.error
    return shown


def write_report(found: Verification, prefix: Path) -> tuple[Path, ...]:
    """Write PREFIX.json, PREFIX.html and, if accuracy was measured, the scores; return the paths. Raises
    OSError."""
    data, page = prefix.with_name(f"{prefix.name}.json"), prefix.with_name(f"{prefix.name}.html")
    data.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    page.write_text(as_html(found), encoding="utf-8")
    if found.scored is None:
        return data, page
    scores = prefix.with_name(f"{prefix.name}{SUFFIX}")
    write_scores(found.scored, scores)
    return data, page, scores


def as_html(found: Verification) -> str:
    """Return the report as a page."""
    verdict = "passed" if found.passed else "FAILED"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>kvasir verify: {html.escape(found.deployment)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(found.deployment)}: {verdict}</h1>",
        f"<p>Model {html.escape(found.model)}, disaggregation {html.escape(found.disaggregation)}, "
        f"{html.escape(found.began)}.</p><ul>",
        *(f"<li>{html.escape(each)}</li>" for each in found.hardware),
        "</ul><h2>Checks</h2>",
        _table(
            ("", "check", "evidence"),
            ((check.result, check.name, check.detail) for check in found.checks),
            lambda row: f" class={row[0]}",
        ),
    ]
    if found.quality is not None:
        parts += ["<h2>Accuracy on held-out text</h2>", _table(QUALITY_HEAD, quality_rows(found.quality))]
    if found.transfers:
        parts += ["<h2>KV transfer between workers</h2>", _table(TRANSFER_HEAD, transfer_rows(found))]
    if found.curve:
        parts += [
            "<h2>Load</h2>",
            _table(CURVE_HEAD, curve_rows(found.curve)),
            _plot("TTFT p50, ms", [(each.streams, each.ttft_p50_s * 1e3) for each in found.curve]),
            _plot("ITL p50, ms", [(each.streams, each.itl_p50_s * 1e3) for each in found.curve]),
            _plot("tokens/s", [(each.streams, each.tokens_per_s) for each in found.curve]),
        ]
    return "\n".join(parts) + "\n"


QUALITY_HEAD = ("", "PERPLEXITY", "SAME TOP TOKEN", "KL MEAN", "KL P99 NATS")


def quality_rows(found: QualityFigures) -> list[tuple[str, ...]]:
    """Return the cells of the deployment's row, and of the baseline's."""
    own, compared = f"{found.perplexity:.4f}", found.comparison
    if compared is None:
        return [("this deployment", own, "-", "-", "-")]
    return [
        (
            "this deployment",
            own,
            f"{compared.agreement:.2%}",
            f"{compared.kl_nats:.5f}",
            f"{compared.kl_p99_nats:.5f}",
        ),
        (compared.baseline, f"{compared.perplexity:.4f}", "-", "-", "-"),
    ]


TRANSFER_HEAD = ("PROMPT TOKENS", "BYTES", "MS", "GB/S", "OF THE LINK")


def transfer_rows(found: Verification) -> list[tuple[str, ...]]:
    """Return the cells of each transfer."""
    link = found.options.link_bytes_per_s
    return [
        (
            f"{each.prompt_tokens:,}",
            f"{each.moved_bytes:,}",
            f"{each.seconds * 1e3:.1f}",
            f"{each.bytes_per_s / 1e9:.2f}",
            f"{each.bytes_per_s / link:.0%}" if link else "-",
        )
        for each in found.transfers
    ]


CURVE_HEAD = ("STREAMS", "TTFT P50", "P99 MS", "ITL P50", "P99 MS", "TOKENS/S", "REQUESTS/S")


def curve_rows(curve: Iterable[LoadPoint]) -> list[tuple[str, ...]]:
    """Return the cells of each load."""
    return [
        (
            str(each.streams),
            f"{each.ttft_p50_s * 1e3:.1f}",
            f"{each.ttft_p99_s * 1e3:.1f}",
            f"{each.itl_p50_s * 1e3:.1f}",
            f"{each.itl_p99_s * 1e3:.1f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.requests_per_s:.2f}",
        )
        for each in curve
    ]


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    style: Callable[[Sequence[str]], str] = lambda _: "",
) -> str:
    cells = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    lines = [f"<table><tr>{cells}</tr>"]
    for row in rows:
        cells = "".join(f"<td>{html.escape(each)}</td>" for each in row)
        lines.append(f"<tr{style(row)}>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _plot(title: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a line over the number of streams, both axes from zero."""
    right = max(x for x, _ in points) or 1.0
    top = max(y for _, y in points) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _MARGIN + x / right * (_WIDTH - 2 * _MARGIN),
            _HEIGHT - _MARGIN - y / top * (_HEIGHT - 2 * _MARGIN),
        )

    placed = [at(x, y) for x, y in points]
    line = " ".join(f"{x:.0f},{y:.0f}" for x, y in placed)
    dots = "".join(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="#0969da"/>' for x, y in placed)
    labels = "".join(
        f'<text x="{at(x, 0)[0]:.0f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">{x:g}</text>'
        for x, _ in points
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}" '
        'fill="currentColor" font-size="12">'
        f'<text x="{_MARGIN}" y="16">{html.escape(title)}, by concurrent streams</text>'
        f'<text x="{_MARGIN - 6}" y="{_MARGIN + 4}" text-anchor="end">{top:.3g}</text>'
        f'<path d="M{_MARGIN} {_MARGIN}V{_HEIGHT - _MARGIN}H{_WIDTH - _MARGIN}" fill="none" stroke="#8888"/>'
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>{dots}{labels}</svg>'
    )
