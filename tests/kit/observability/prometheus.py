"""A real Prometheus that scrapes one target and evaluates rules, for as long as a test needs it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.kit.processes import free_port
from tests.kit.programs import program

_READY_S = 30.0
_ANSWER_S = 10.0
_POLL_S = 0.1


class PrometheusServer:
    """A server at `address` (host:port)."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def firing(self) -> dict[str, str]:
        """The names of the alerts that fire, with the labels of one of them as text."""
        found = await self._get("/api/v1/alerts")
        return {
            each["labels"]["alertname"]: json.dumps(each["labels"])
            for each in found["alerts"]
            if each["state"] == "firing"
        }

    async def query(self, expression: str) -> dict[str, float]:
        """The present value of each series of an expression."""
        asked = urllib.parse.urlencode({"query": expression})
        found = await self._get(f"/api/v1/query?{asked}")
        return {
            json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found["result"]
        }

    async def ready(self) -> bool:
        """Whether it answers."""
        try:
            await asyncio.to_thread(_read, f"http://{self.address}/-/ready")
        except (OSError, urllib.error.URLError):
            return False
        return True

    async def _get(self, path: str) -> dict[str, Any]:
        answer = json.loads(await asyncio.to_thread(_read, f"http://{self.address}{path}"))
        data: dict[str, Any] = answer["data"]
        return data


@asynccontextmanager
async def prometheus(
    folder: Path, target: str, rules: Mapping[str, Any], every_s: float = 1.0
) -> AsyncIterator[PrometheusServer]:
    """Scrape `target` (host:port) and evaluate `rules` every so often until the block ends. Raise
    TimeoutError if Prometheus does not become ready."""
    every = f"{round(1000 * every_s)}ms"
    (folder / "rules.json").write_text(json.dumps(rules))
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["rules.json"],
        "scrape_configs": [{"job_name": "kvasir", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        "--config.file=prometheus.json",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
        "--log.level=error",
        cwd=folder,
    )
    try:
        server = PrometheusServer(address)
        async with asyncio.timeout(_READY_S):
            while not await server.ready():
                await asyncio.sleep(_POLL_S)
        yield server
    finally:
        process.terminate()
        await process.wait()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
        body: bytes = answer.read()
    return body
