"""The report of `kvasir verify`: one JSON file, and one HTML page without external resources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

from kvasir_platform.cli.verify.curves import LoadPoint
from kvasir_platform.cli.verify.run import Verification
from kvasir_platform.cli.verify.score_file import SUFFIX, write_scores
from kvasir_platform.cli.verify.scores import QualityFigures
from kvasir_platform.reports.charts import LineChart, PlottedLine, line_chart
from kvasir_platform.reports.document import charts, document, table


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
        f"<h1>{escape(found.deployment)}: {verdict}</h1>",
        f"<p>Model {escape(found.model)}, disaggregation {escape(found.disaggregation)}, "
        f"{escape(found.began)}.</p><ul>",
        *(f"<li>{escape(each)}</li>" for each in found.hardware),
        "</ul><h2>Checks</h2>",
        table(
            ("", "check", "evidence"),
            ((check.result, check.name, check.detail) for check in found.checks),
            words=True,
            classes=[check.result for check in found.checks],
        ),
    ]
    if found.quality is not None:
        parts += ["<h2>Accuracy on held-out text</h2>", table(QUALITY_HEAD, quality_rows(found.quality))]
    if found.transfers:
        parts += ["<h2>KV transfer between workers</h2>", table(TRANSFER_HEAD, transfer_rows(found))]
    if found.curve:
        parts += [
            "<h2>Load</h2>",
            table(CURVE_HEAD, curve_rows(found.curve)),
            charts(line_chart(each) for each in _curve_charts(found.curve)),
        ]
    return document(f"kvasir verify: {found.deployment}", "".join(parts))


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


def _curve_charts(curve: Sequence[LoadPoint]) -> Iterable[LineChart]:
    for title, unit, values in (
        ("TTFT p50", "ms", [each.ttft_p50_s * 1e3 for each in curve]),
        ("ITL p50", "ms", [each.itl_p50_s * 1e3 for each in curve]),
        ("Output", "tokens/s", [each.tokens_per_s for each in curve]),
    ):
        points = tuple((float(each.streams), value) for each, value in zip(curve, values, strict=True))
        yield LineChart(title, "concurrent streams", unit, (PlottedLine("", points),))
