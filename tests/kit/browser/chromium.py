"""Opens pages in headless Chromium, as an operator's browser would.

Chromium is Debian's package `chromium`; a machine without it fails the tests that need it. Its resolver knows
no other host, so a page that asks one is seen and gets nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
_TIMEOUT_S = 60
_CONSOLE = re.compile(r"CONSOLE[:(]\S* (.*)")
_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL)
_BROWSERS_OWN = tuple(
    f"{scheme}://{host}/"
    for scheme in ("http", "https")
    for host in (
        *(f"{name}.google.com" for name in ("accounts", "android.clients", "clients2", "www", "update")),
        *(f"{name}.googleapis.com" for name in ("update", "optimizationguide-pa")),
        "optimizationguide-pa.google.com",
    )
)
"""What Chromium itself asks, whatever page is open."""
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-sync",
    "--disable-extensions",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-domain-reliability",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_VIRTUAL_TIME = "--virtual-time-budget=4000"


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


def open_page(
    page: Path | str, name: str, tmp_path: Path, *, dark: bool = False, height: int = 1400
) -> OpenedPage:
    """Open a file or an address, and keep a screenshot of this name."""
    address = page if isinstance(page, str) else page.resolve().as_uri()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    screenshot = SCREENSHOTS / f"{name}.png"
    log = tmp_path / f"{name}.net.json"
    scheme = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if dark else ()
    dumped = _run(
        "--dump-dom",
        f"--screenshot={screenshot}",
        f"--log-net-log={log}",
        f"--user-data-dir={tmp_path / name}",
        f"--window-size=1200,{height}",
        *scheme,
        address,
    )
    assert screenshot.stat().st_size > 0
    own = address.partition("#")[0].rpartition("/")[0]
    console = tuple(found.group(1) for line in dumped.stderr.splitlines() if (found := _CONSOLE.search(line)))
    return OpenedPage(dumped.stdout, console, tuple(_requests(log, own)), screenshot)


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [chromium(), *OPTIONS, _VIRTUAL_TIME, *options],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )


def _requests(log: Path, own: str) -> list[str]:
    """The addresses in a network log, without the page's own."""
    urls = set(re.findall(r'"url":"([a-z]+:[^"]*)"', log.read_text()))
    return sorted(
        url for url in urls if not url.startswith((own, "data:", "file:", "chrome:", *_BROWSERS_OWN))
    )
