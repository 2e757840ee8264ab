"""A link that is down drops packets and breaks no connection; after it is up again, the data arrives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.lab import netns
from tests.kit.lab.netns import Namespace
from tests.kit.lab.processes import Processes
from tests.kit.programs import program

SERVER = """
import asyncio, json, sys

async def serve(reader, writer):
    while data := await reader.read(1024):
        writer.write(data)

async def main():
    server = await asyncio.start_server(serve, sys.argv[1], 0)
    print(json.dumps({"event": "serving", "port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.fixture
async def namespace() -> object:
    program("ip")
    if (missing := netns.available()) is not None:
        pytest.skip(missing)
    return Namespace()


async def test_a_link_goes_down_and_up_under_a_connection(namespace: Namespace, tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    try:
        async with namespace:
            argv = namespace.command([sys.executable, "-c", SERVER, namespace.address])
            process, said = await processes.start_ready("server", argv, "serving")
            # The pid is the process's own, and not that of a helper around it.
            assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(sys.executable.encode())
            reader, writer = await asyncio.open_connection(namespace.address, said["port"])
            writer.write(b"a")
            assert await reader.readexactly(1) == b"a"
            await namespace.down()
            assert not await namespace.is_up()
            writer.write(b"b")
            answer = asyncio.ensure_future(reader.readexactly(1))
            done, _ = await asyncio.wait((answer,), timeout=0.3)
            assert not done
            await namespace.up()
            assert await asyncio.wait_for(answer, 10.0) == b"b"
            writer.close()
            await process.kill()
    finally:
        await processes.close()


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


async def test_nothing_remains_of_a_namespace(namespace: Namespace) -> None:
    async with namespace:
        assert namespace.name in ip("netns")
        assert namespace.host_end in ip("-o", "link")
    assert namespace.name not in ip("netns")
    assert namespace.host_end not in ip("-o", "link")


async def test_two_namespaces_share_neither_name_nor_address() -> None:
    one, two = Namespace(), Namespace()
    assert one.name != two.name
    assert one.address != two.address


async def test_without_root_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert netns.available() == "network namespaces need root"
    with pytest.raises(netns.NetnsUnavailable, match="need root"):
        async with Namespace():
            pass
