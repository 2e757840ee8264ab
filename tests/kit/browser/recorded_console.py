"""The web console over pages that were recorded, for what no deployment shows within a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from kvasir_platform.gateway.console.site_files import CONSOLE_FILES, INDEX, read_site

_GRACE_S = 0.01


class RecordedConsole:
    """One viewer's console at `address`. It shows the status page that `show` was given last."""

    def __init__(self) -> None:
        self.address = ""
        self._files = read_site()
        self._pages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1)

    async def show(self, status: dict[str, Any]) -> None:
        """Send a status page to the viewer."""
        await self._pages.put(status)

    async def file(self, request: web.Request) -> web.Response:
        """GET of a file of the console."""
        found = self._files[request.match_info["name"] or INDEX]
        return web.Response(body=found.plain, headers={"content-type": found.content_type.decode()})

    async def live(self, request: web.Request) -> web.StreamResponse:
        """GET of the stream of pages."""
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        while True:
            page = json.dumps(await self._pages.get())
            await stream.write(f"event: status\ndata: {page}\n\n".encode())


@asynccontextmanager
async def recorded_console() -> AsyncIterator[RecordedConsole]:
    """Serve until the block ends."""
    console, app = RecordedConsole(), web.Application()
    app.router.add_get(f"{CONSOLE_FILES}live", console.live)
    app.router.add_get(f"{CONSOLE_FILES}{{name:[a-z.]*}}", console.file)
    # For aiohttp, 0 is no limit.
    runner = web.AppRunner(app, shutdown_timeout=_GRACE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        console.address = f"http://{host}:{port}{CONSOLE_FILES}"
        yield console
    finally:
        await runner.cleanup()
