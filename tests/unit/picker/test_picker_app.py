"""The picker's process, from its start to its end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import grpc.aio
from tests.kit.traffic.ext_proc_client import GatewayCall, destination

from kvasir.clock import MonotonicClock
from kvasir_platform.apps.picker_app import PickerOptions, serve
from kvasir_platform.picker.ext_proc_server import SERVICE


async def test_it_serves_until_it_is_asked_to_stop() -> None:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = PickerOptions(port=0, endpoints=("10.0.0.7:8000",))
    running = asyncio.create_task(serve(options, MonotonicClock(), started.set_result))
    async with grpc.aio.insecure_channel(await started) as made:
        channel: Any = made
        process = channel.stream_stream(f"/{SERVICE}/Process")
        request = GatewayCall(process())
        response = await request.ask({"model": "m", "prompt": "Hello"})
        assert destination(response) == ["10.0.0.7:8000"]
        await request.receive()
        await request.end()
    signal.raise_signal(signal.SIGTERM)
    assert await running == 0
