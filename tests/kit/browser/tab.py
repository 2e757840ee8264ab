"""Uses a page in headless Chromium: typing, following links, and waiting for what it shows.

A browser serves any number of tabs, each with a profile of its own, because to start one takes longer than
most tests. Playwright runs in a thread of its own, so that tabs can be used from any event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as NeverTrue
from tests.kit.browser.chromium import keep_line, kept, launch_options

T = TypeVar("T")

_WAIT_MS = 30_000
_LOOK_MS = 25
"""By default the page is looked at in each frame, for which the browser draws it sixty times a second."""
_SHOWN_CHARACTERS = 4_000
WIDTH, HEIGHT = 1280, 900
"""In pixels: the narrowest window in which the console has to be usable."""


class Tab:
    """One tab. `console` has what the page wrote there and its errors, `asked` each address that it asked."""

    def __init__(self, page: Page, thread: ThreadPoolExecutor) -> None:
        self._page = page
        self._thread = thread
        self.console: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(_WAIT_MS)
        page.on("console", lambda message: keep_line(self.console, message.type, message.text))
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    async def call(self, function: Callable[[Page], T]) -> T:
        """Call a function of Playwright's page."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._page)

    async def open(self, address: str) -> None:
        """Go to an address, and wait until its document is loaded."""
        await self.call(lambda page: page.goto(address))

    async def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true in the page; return its value."""
        return await self.call(lambda page: _value(page, expression))

    async def shows(self, text: str) -> None:
        """Wait until the page shows this text."""
        await self.until(f"document.body.innerText.includes({json.dumps(text)})")

    async def click(self, selector: str) -> None:
        """Click the first element of a selector, once it can be."""
        await self.call(lambda page: page.locator(selector).first.click())

    async def type(self, selector: str, text: str) -> None:
        """Focus an element and type, as a person does. A line feed presses Enter."""
        await self.call(lambda page: page.locator(selector).first.press_sequentially(text))

    async def press(self, key: str) -> None:
        """Press a key."""
        await self.call(lambda page: page.keyboard.press(key))

    async def screenshot(self, name: str, *, dark: bool = False, height: int = HEIGHT) -> Path:
        """Keep a picture of this name under build/screenshots."""
        return await self.call(lambda page: _picture(page, name, "dark" if dark else "light", height))


def _value(page: Page, expression: str) -> Any:
    try:
        return page.wait_for_function(f"() => ({expression})", polling=_LOOK_MS).json_value()
    except NeverTrue:
        shown = page.inner_text("body")[:_SHOWN_CHARACTERS]
        raise AssertionError(f"never true: {expression}; the page shows: {shown}") from None


def _picture(page: Page, name: str, scheme: Literal["dark", "light"], height: int) -> Path:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.screenshot(path=kept(name))
    return kept(name)


class RunningBrowser:
    """A browser, and the thread in which it is used."""

    def __init__(self, browser: Browser, thread: ThreadPoolExecutor) -> None:
        self._browser = browser
        self._thread = thread

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A tab with a new profile."""
        run = asyncio.get_running_loop().run_in_executor
        page = await run(self._thread, self._new_page)
        try:
            yield Tab(page, self._thread)
        finally:
            await run(self._thread, page.close)

    def _new_page(self) -> Page:
        return self._browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})


@contextmanager
def running_browser() -> Iterator[RunningBrowser]:
    """A browser until the block ends."""
    with ThreadPoolExecutor(1, "browser") as thread:
        playwright = thread.submit(sync_playwright().start).result()
        try:
            browser = thread.submit(lambda: playwright.chromium.launch(**launch_options())).result()
            try:
                yield RunningBrowser(browser, thread)
            finally:
                thread.submit(browser.close).result()
        finally:
            thread.submit(playwright.stop).result()


@asynccontextmanager
async def opened_tab() -> AsyncIterator[Tab]:
    """A tab of a browser of its own."""
    with running_browser() as browser:
        async with browser.tab() as tab:
            yield tab
