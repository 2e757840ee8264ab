"""An edge process: the gateway of one CPU, started by a router in another process.

Its configuration arrives over the link that it inherits, and it ends with the link. Its streams then end with
a clean error, on which clients retry at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from kvasir.clock import MonotonicClock
from kvasir.collector import freeze_gc
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.edge.address import shared
from kvasir_platform.edge.core_link import CoreLink
from kvasir_platform.edge.frames import EdgeWelcome, note_of
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.start import make_gateway, make_metrics, make_models

_LAST_WORDS_S = 5.0


async def serve(link_fd: int) -> int:
    """Serve until the link ends or requests a drain. Return the exit status."""
    clock = MonotonicClock()
    link = CoreLink(clock)
    try:
        welcome = await link.connect(socket.socket(fileno=link_fd))
        deployment = Deployment.model_validate_json(welcome.deployment)
        configure_logging(deployment.telemetry.log_level)
        await _serve(deployment, welcome, link, clock)
    except KvasirError as error:
        link.failed(note_of(error))
        return 1
    finally:
        lost = link.lost
        link.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(link.ended.wait(), _LAST_WORDS_S)
    return 1 if lost else 0


async def _serve(deployment: Deployment, welcome: EdgeWelcome, link: CoreLink, clock: MonotonicClock) -> None:
    addresses = welcome.addresses
    metrics = make_metrics(deployment)
    core = RemoteCore(
        link.router,
        link.limits,
        link.responses,
        link.names,
        welcome.cache_secret,
        link.pages.show,
        link.router.shares,
    )
    gateway = make_gateway(deployment, core, clock, metrics, make_models(deployment))
    link.figures = metrics.render
    link.on_drain = link.on_lost = gateway.stop
    freeze_gc()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, gateway.stop)
    try:
        console = [shared(host, port) for host, port in welcome.console]
        await gateway.serve([shared(host, port) for host, port in addresses], link.started, console)
    except OSError as error:
        raise ConfigError(f"gateway: an edge cannot listen on {addresses}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvasir-edge", description="Run an edge of a router that starts it."
    )
    parser.add_argument("--link-fd", type=int, required=True, help="the inherited end of the link")
    args = parser.parse_args(argv)
    # A Ctrl-C reaches every process of the terminal; the router stops its edges itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status: int = uvloop.run(serve(args.link_fd))
    return status


if __name__ == "__main__":
    sys.exit(main())
