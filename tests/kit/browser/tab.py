"""Drives a tab of headless Chromium over its DevTools protocol, for pages that have to be used and not only
opened: typing, following links, and waiting for what a page shows."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from tests.kit.browser.chromium import OPTIONS, SCREENSHOTS, chromium

_WAIT_S = 30
_UNTIL = """new Promise((resolve) => {
  const look = () => { const found = (%s); if (found) resolve(found); else setTimeout(look, 25); };
  look();
})"""
"""Resolves with the first true value of an expression."""


class Tab:
    """One tab. `console` has what the page wrote there and its errors, `asked` each address that it asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket = socket
        self._session = session
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.console: list[str] = []
        self.asked: list[str] = []

    async def read(self) -> None:
        """Read what the browser says, until it ends."""
        async for message in self._socket:
            found = json.loads(message.data)
            answer = self._answers.pop(found.get("id", 0), None)
            if answer is not None:
                answer.set_result(found)
            elif found.get("method") == "Page.loadEventFired":
                self._loaded.set()
            elif found.get("method") == "Runtime.consoleAPICalled":
                self.console.append(str([each.get("value") for each in found["params"]["args"]]))
            elif found.get("method") == "Runtime.exceptionThrown":
                self.console.append(str(found["params"]["exceptionDetails"]))
            elif found.get("method") == "Log.entryAdded":
                entry = found["params"]["entry"]
                # `verbose` is Chromium's advice, and no fault.
                self.console += [str(entry["text"])] if entry["level"] != "verbose" else []
            elif found.get("method") == "Network.requestWillBeSent":
                self.asked.append(str(found["params"]["request"]["url"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises AssertionError for an error, TimeoutError for no answer."""
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        message = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        found = await asyncio.wait_for(answer, _WAIT_S)
        assert "error" not in found, found["error"]
        result: dict[str, Any] = found["result"]
        return result

    async def begin(self) -> None:
        """Open a tab in a browser that has just started, and listen to it."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, address: str) -> None:
        """Go to an address, and wait until its document is loaded."""
        self._loaded.clear()
        if "loaderId" in await self.call("Page.navigate", url=address):
            await asyncio.wait_for(self._loaded.wait(), _WAIT_S)

    async def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true in the page; return its value."""
        try:
            found = await self.call(
                "Runtime.evaluate", expression=_UNTIL % expression, awaitPromise=True, returnByValue=True
            )
        except TimeoutError:
            raise AssertionError(f"never true: {expression}; the page shows: {await self.text()}") from None
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def shows(self, text: str) -> None:
        """Wait until the page shows this text."""
        await self.until(f"document.body.innerText.includes({json.dumps(text)})")

    async def text(self) -> str:
        """What the page shows."""
        found = await self.call("Runtime.evaluate", expression="document.body.innerText", returnByValue=True)
        return str(found["result"]["value"])

    async def click(self, selector: str) -> None:
        """Click the first element of a selector."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.click() ?? true")

    async def type(self, selector: str, text: str) -> None:
        """Focus an element and type, as a person does. A line feed presses Enter."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.focus() ?? true")
        for i, line in enumerate(text.split("\n")):
            if i:
                await self.press("Enter", "\r")
            if line:
                await self.call("Input.insertText", text=line)

    async def press(self, key: str, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text)

    async def screenshot(
        self, name: str, *, dark: bool = False, width: int = 1280, height: int = 900
    ) -> Path:
        """Keep a picture of this name under build/screenshots."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        found = await self.call("Page.captureScreenshot", format="png")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        path.write_bytes(base64.b64decode(found["data"]))
        return path


@asynccontextmanager
async def opened_tab(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, whose profile is in `folder`."""
    process = await asyncio.create_subprocess_exec(
        chromium(),
        *OPTIONS,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        address = await asyncio.wait_for(_devtools(process.stderr), _WAIT_S)
        draining = asyncio.create_task(_drain(process.stderr), name="browser's log")
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(address, max_msg_size=1 << 26) as socket,
        ):
            tab = Tab(socket, "")
            reading = asyncio.create_task(tab.read(), name="browser")
            await tab.begin()
            try:
                yield tab
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        process.terminate()
        await asyncio.wait([draining])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _devtools(log: asyncio.StreamReader) -> str:
    """Return the address that the browser writes into its log when it is ready."""
    async for line in log:
        _, found, address = line.decode(errors="replace").partition("DevTools listening on ")
        if found:
            return address.strip()
    raise AssertionError("the browser ended before it listened")


async def _drain(log: asyncio.StreamReader) -> None:
    """Read the rest, so that the browser never waits for a full pipe."""
    while await log.read(1 << 16):
        pass
