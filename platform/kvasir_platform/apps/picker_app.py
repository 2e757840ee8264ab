"""The endpoint picker's process: `kvasir picker`, for gateways with the Gateway API Inference Extension."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.clock import MonotonicClock
from kvasir.core.errors import ConfigError
from kvasir.core.membership import host_port
from kvasir.ports.clock import Clock
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.picker.endpoints import EndpointPicker, PickerLimits
from kvasir_platform.picker.ext_proc_server import ExtProcServer, ServerBounds, ServerKeys

TICK_S = 0.25
READ_S = 2.0
CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_API_S = 10.0


@dataclass(frozen=True, slots=True)
class PickerOptions:
    """See `kvasir picker --help`. Either `endpoints` or `pool` is set."""

    host: str = "127.0.0.1"
    port: int = 9002
    endpoints: tuple[str, ...] = ()
    pool: str | None = None
    namespace: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    test_headers: bool = False
    log_level: str = "info"
    limits: PickerLimits = PickerLimits()
    bounds: ServerBounds = ServerBounds()


async def serve(options: PickerOptions, clock: Clock, started: Callable[[str], None]) -> int:
    """Pick until SIGTERM or SIGINT. `started` is called with the address. Raise ConfigError if it cannot
    start."""
    picker = EndpointPicker(options.limits, random.Random())  # noqa: S311 - spreads ties, guards nothing
    server = ExtProcServer(
        picker, clock.now, bounds=options.bounds, keys=_keys(options), test_headers=options.test_headers
    )
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    port = await server.start(options.host, options.port)
    tasks = [
        asyncio.create_task(_tick(picker, clock), name="picker-tick"),
        asyncio.create_task(_follow(options, picker, server, clock), name="picker-members"),
    ]
    ending = asyncio.create_task(stop.wait(), name="picker-stop")
    started(host_port(options.host, port))
    try:
        done, _ = await asyncio.wait([*tasks, ending], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (*tasks, ending):
            task.cancel()
        await asyncio.wait([*tasks, ending])
        await server.stop()
    return 0


async def _tick(picker: EndpointPicker, clock: Clock) -> None:
    while True:
        await clock.sleep(TICK_S)
        picker.tick(clock.now())


async def _follow(
    options: PickerOptions, picker: EndpointPicker, server: ExtProcServer, clock: Clock
) -> None:
    """Keep the members of the pool up to date."""
    if options.pool is None:
        picker.update(options.endpoints, clock.now())
        await server.set_ready(ready=True)
        await asyncio.Event().wait()
        return
    # The client of Kubernetes is imported where it is used: it is large.
    from kvasir_platform.cluster.kubernetes.access import Access
    from kvasir_platform.cluster.kubernetes.api import ApiServer
    from kvasir_platform.picker.pool_members import PoolMembers

    access = Access.in_cluster(CREDENTIALS, os.environ)
    api = ApiServer(access, timeout_s=_API_S)
    members = PoolMembers(api, options.namespace or access.namespace(), options.pool)
    while True:
        found = await members.read()
        if found is not None:
            picker.update(found, clock.now())
            await server.set_ready(ready=True)
        await clock.sleep(READ_S)


def _keys(options: PickerOptions) -> ServerKeys | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    try:
        return ServerKeys(options.tls_cert.read_bytes(), options.tls_key.read_bytes())
    except OSError as error:
        raise ConfigError(f"picker: the certificate cannot be read: {error}") from error


def run(options: PickerOptions) -> int:
    """Run the picker until it is stopped. Raise ConfigError if it cannot start."""
    configure_logging(options.log_level)
    logging.getLogger(__name__).info("picking for %s", options.pool or ", ".join(options.endpoints))
    return asyncio.run(serve(options, MonotonicClock(), _report))


def _report(address: str) -> None:
    sys.stdout.write(json.dumps({"event": "listening", "address": address}) + "\n")
    sys.stdout.flush()
