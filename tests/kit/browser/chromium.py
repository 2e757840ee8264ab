"""Opens pages in headless Chromium, as an operator's browser would.

Playwright drives Debian's package `chromium`, so that nothing is downloaded; a machine without the package
fails the tests that need it. The browser's resolver knows no other host, so a page that asks one is seen and
gets nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL)
_INLINE = ("data:", "blob:")
_LATER_MS = 4_000


@dataclass(frozen=True)
class OpenedPage:
    """A page after its scripts have run. `console` has every line that it wrote there, errors included;
    `foreign` the addresses that it asked beside its own; `screenshot` is a PNG under build/screenshots."""

    html: str
    console: tuple[str, ...]
    foreign: tuple[str, ...]
    screenshot: Path

    @property
    def text(self) -> str:
        """What it shows, as one line."""
        return " ".join(_TAGS.sub(" ", self.html).split())


def chromium() -> str:
    """The browser's path. Raises AssertionError that names the package."""
    found = shutil.which("chromium")
    assert found is not None, "chromium is not installed: apt-get install chromium"
    return found


def launch_options() -> Mapping[str, Any]:
    """How Playwright launches the browser. Raises AssertionError as `chromium` does."""
    rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    # Root, as which containers run tests, has no sandbox.
    return {"executable_path": chromium(), "chromium_sandbox": False, "args": [rules]}


def kept(name: str) -> Path:
    """Where the picture of this name is kept."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS / f"{name}.png"


def keep_line(lines: list[str], kind: str, text: str) -> None:
    """Keep what was written into a page's console."""
    # `verbose` is Chromium's advice, and no fault.
    if kind != "verbose":
        lines.append(text)


def open_page(page: Path | str, name: str, *, dark: bool = False, height: int = 1400) -> OpenedPage:
    """Open a file or an address, and keep a screenshot of this name."""
    address = page if isinstance(page, str) else page.resolve().as_uri()
    own = address.partition("#")[0].rpartition("/")[0]
    console: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright, playwright.chromium.launch(**launch_options()) as browser:
        opened = browser.new_page(
            viewport={"width": 1200, "height": height}, color_scheme="dark" if dark else "light"
        )
        opened.on("console", lambda message: keep_line(console, message.type, message.text))
        opened.on("pageerror", lambda error: console.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("websocket", lambda socket: asked.append(socket.url))
        # What scripts do later is seen too, and not waited for.
        opened.clock.install()
        opened.goto(address)
        opened.clock.run_for(_LATER_MS)
        opened.screenshot(path=kept(name))
        html = opened.content()
    foreign = sorted({each for each in asked if not each.startswith((own, *_INLINE))})
    return OpenedPage(html, tuple(console), tuple(foreign), kept(name))
