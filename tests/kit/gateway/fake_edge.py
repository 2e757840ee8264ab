"""An edge whose behaviour is set by its core's welcome: `serve`, `refuse` to start, `die` before it listens,
or be `deaf` once it listens."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket

from kvasir.clock import MonotonicClock
from kvasir.core.errors import ConfigError
from kvasir_platform.edge.core_link import CoreLink
from kvasir_platform.edge.frames import note_of


async def main(link_fd: int) -> int:
    """Return the exit status."""
    link = CoreLink(MonotonicClock())
    welcome = await link.connect(socket.socket(fileno=link_fd))
    host, port = welcome.addresses[0]
    manner = welcome.deployment
    if manner == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    if manner == b"refuse":
        link.failed(note_of(ConfigError("no certificate")))
        link.close()
        await link.ended.wait()
        return 1
    stop = asyncio.Event()
    link.on_drain = link.on_lost = stop.set
    link.started(host, port)
    if manner == b"deaf":
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGSTOP)
    await stop.wait()
    link.close()
    await link.ended.wait()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--link-fd", type=int)
    raise SystemExit(asyncio.run(main(parser.parse_args().link_fd)))
