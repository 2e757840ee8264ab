"""Where a browser draws the charts of a page, and what of them it cuts off."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from tests.kit.browser.chromium import OpenedPage, open_page

_PROBE = """<script>
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
  inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
document.body.dataset.charts = JSON.stringify([...document.querySelectorAll("svg")].map(svg => {
  const whole = svg.getBoundingClientRect();
  const cut = [...svg.querySelectorAll("text, polyline, circle, rect")].filter(
    each => outside(each.getBoundingClientRect(), whole));
  return {name: svg.getAttribute("aria-label"), width: whole.width,
    lines: svg.querySelectorAll("polyline").length, cut: cut.map(each => each.textContent || each.tagName)};
}));
</script>"""


@dataclass(frozen=True)
class DrawnChart:
    """A chart: its name, its width in pixels, the number of its lines, and the texts or tags of its parts
    that are outside it, which a browser does not show."""

    name: str
    width: float
    lines: int
    cut: tuple[str, ...]


def open_charts(
    page: Path, name: str, tmp_path: Path, *, dark: bool = False, height: int = 1400
) -> tuple[OpenedPage, list[DrawnChart]]:
    """Open a page as `open_page` does, and measure its charts."""
    probed = tmp_path / f"{name}-probed.html"
    whole = page.read_text(encoding="utf-8")
    assert "</body>" in whole
    probed.write_text(whole.replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    opened = open_page(probed, name, dark=dark, height=height)
    (text,) = re.findall(r'data-charts="([^"]*)"', opened.html)
    found = json.loads(unescape(text))
    return opened, [
        DrawnChart(each["name"], each["width"], each["lines"], tuple(each["cut"])) for each in found
    ]
