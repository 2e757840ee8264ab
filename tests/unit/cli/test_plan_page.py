"""The page of `kvasir plan` as a browser lays it out; a screenshot is kept in build/screenshots."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from kvasir_platform.cli.main import main

SCREENSHOTS = Path(__file__).resolve().parents[3] / "build" / "screenshots"
PROBE = """<script>
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
  inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
const charts = [...document.querySelectorAll("svg")].map(svg => ({
  id: svg.id, width: svg.getBoundingClientRect().width, lines: svg.querySelectorAll("polyline.line").length,
  outside: [...svg.querySelectorAll("text, polyline, circle")].filter(
    each => outside(each.getBoundingClientRect(), svg.getBoundingClientRect())).map(each => each.textContent),
}));
const found = {charts, resources: performance.getEntriesByType("resource").length};
document.body.dataset.found = JSON.stringify(found);
</script>"""


def chromium(*arguments: str) -> str:
    program = shutil.which("chromium")
    assert program is not None, "install the Debian package chromium"
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    load = ("--rate", "10", "--prompt-tokens", "1500/4000", "--prefix-share", "0.3")
    assert main(["plan", "llama-3.1-8b", *load, "--gpus", "H100,A100,L40S,L4", "--html", str(path)]) == 0
    return path


@pytest.mark.parametrize("width", [1300, 500])
def test_charts_are_drawn_whole_and_nothing_is_fetched(page: Path, tmp_path: Path, width: int) -> None:
    probed = tmp_path / "probed.html"
    probed.write_text(
        page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8"
    )
    dom = chromium(f"--window-size={width},1800", "--dump-dom", probed.as_uri())
    (text,) = re.findall(r'data-found="([^"]*)"', dom)
    found: dict[str, Any] = json.loads(unescape(text))
    assert [chart["id"] for chart in found["charts"]] == ["chart-itl", "chart-ttft"]
    for chart in found["charts"]:
        assert chart["lines"] == 5
        assert chart["width"] > 300
        assert chart["outside"] == []
    assert found["resources"] == 0


def test_a_screenshot_is_kept(page: Path) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / "plan.png"
    path.unlink(missing_ok=True)
    chromium("--window-size=1300,2600", f"--screenshot={path}", page.as_uri())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 50_000
