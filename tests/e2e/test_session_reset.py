"""A worker process, a router process, and a TCP connection between them that is reset in mid-stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.slow]
STREAMS, TOKENS = 8, 120

SPEC = """
disaggregation: never
model: {dtype: float32}
pools: [{name: both, role: both}]
discovery: {kind: static, endpoints: ["both=127.0.0.1:PORT"]}
gateway: {port: 0}
"""


class ResettingProxy:
    """Forwards TCP to one address; `reset` ends every connection with RST, as a failing network does."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        start = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.accepted = 0
        self.resets = 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self.accepted += 1
        self._pairs.append((writer, far_writer))
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    def reset(self) -> None:
        asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result(10)

    async def _reset(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for writer in pair:
                if writer.is_closing():
                    continue
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            self.resets += 1

    def close(self) -> None:
        self.reset()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class App:
    """One of our processes, known by the JSON events it prints."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"kvasir_platform.apps.{module}", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"event"') and "address" in (event := json.loads(line)):
                return str(event["address"])
        pytest.fail(f"ended without an address: {Path(self._log.name).read_text()[-2000:]}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        self._log.close()


@pytest.fixture(scope="module")
def path_through_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ResettingProxy]]:
    folder = tmp_path_factory.mktemp("reset")
    token = folder / "token"
    token.write_text(os.urandom(16).hex())
    spec = folder / "kvasir.yaml"
    spec.write_text(SPEC.replace("PORT", "1"))
    common = (f"--deployment={spec}", f"--token-file={token}")
    worker = App("worker_node", *common, "--pool=both", log=folder / "worker.log")
    proxy = ResettingProxy(worker.address())
    spec.write_text(SPEC.replace("PORT", str(proxy.port)))
    router = App("router_app", *common, log=folder / "router.log")
    url = f"http://{router.address()}"
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/health/ready").status_code != 200:
        if time.monotonic() > deadline:
            pytest.fail("the router does not reach the worker")
    yield url, proxy
    router.stop()
    worker.stop()
    proxy.close()


async def _texts(url: str, proxy: ResettingProxy | None) -> list[str]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    async def one(number: int) -> str:
        text = ""
        stream = await client.completions.create(
            model="kvasir-tiny",
            prompt=f"{number} And it came to pass",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        count = 0
        async for chunk in stream:
            text += chunk.choices[0].text
            count += 1
            if proxy is not None and number == 0 and count in (10, 40, 90):
                proxy.reset()
        return text

    try:
        return list(await asyncio.gather(*(one(number) for number in range(STREAMS))))
    finally:
        await client.close()


async def test_streams_go_on_through_resets_with_nothing_run_again_lost_or_repeated(
    path_through_proxy: tuple[str, ResettingProxy],
) -> None:
    url, proxy = path_through_proxy
    whole = await _texts(url, None)
    resets, connections = proxy.resets, proxy.accepted
    tokens = _generated(url)
    cut = await _texts(url, proxy)
    assert proxy.resets >= resets + 3, "the fault did not happen"
    assert proxy.accepted >= connections + 3
    assert cut == whole
    assert _generated(url) - tokens == STREAMS * TOKENS


def _generated(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("kvasir_output_tokens_total")
    )
