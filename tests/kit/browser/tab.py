"""Uses a page in headless Chromium: typing, following links, and waiting for what it shows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright
from playwright.async_api import TimeoutError as NeverTrue
from tests.kit.browser.chromium import keep_line, kept, launch_options

_WAIT_MS = 30_000
_SHOWN_CHARACTERS = 4_000
WIDTH, HEIGHT = 1280, 900
"""In pixels: the narrowest window in which the console has to be usable."""


class Tab:
    """One tab. `console` has what the page wrote there and its errors, `asked` each address that it asked."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.console: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(_WAIT_MS)
        page.on("console", lambda message: keep_line(self.console, message.type, message.text))
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    async def open(self, address: str) -> None:
        """Go to an address, and wait until its document is loaded."""
        await self.page.goto(address)

    async def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true in the page; return its value."""
        try:
            found = await self.page.wait_for_function(f"() => ({expression})")
        except NeverTrue:
            shown = (await self.page.inner_text("body"))[:_SHOWN_CHARACTERS]
            raise AssertionError(f"never true: {expression}; the page shows: {shown}") from None
        return await found.json_value()

    async def shows(self, text: str) -> None:
        """Wait until the page shows this text."""
        await self.until(f"document.body.innerText.includes({json.dumps(text)})")

    async def click(self, selector: str) -> None:
        """Click the first element of a selector, once it can be."""
        await self.page.locator(selector).first.click()

    async def type(self, selector: str, text: str) -> None:
        """Focus an element and type, as a person does. A line feed presses Enter."""
        await self.page.locator(selector).first.press_sequentially(text)

    async def press(self, key: str) -> None:
        """Press a key."""
        await self.page.keyboard.press(key)

    async def screenshot(self, name: str, *, dark: bool = False, height: int = HEIGHT) -> Path:
        """Keep a picture of this name under build/screenshots."""
        await self.page.emulate_media(color_scheme="dark" if dark else "light")
        await self.page.set_viewport_size({"width": WIDTH, "height": height})
        await self.page.screenshot(path=kept(name))
        return kept(name)


@asynccontextmanager
async def opened_tab() -> AsyncIterator[Tab]:
    """A tab of a browser of its own."""
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(**launch_options()) as browser,
    ):
        yield Tab(await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}))
