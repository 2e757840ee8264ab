"""A minimal streaming client for measurements, cheaper than what it measures.

It speaks HTTP/1.1 over one asyncio connection and reads server-sent events; API tests use the `openai`
package instead.
"""

from __future__ import annotations

import asyncio
import json
import time

from kvasir_platform.bench.client.answers import AnswerEvents, BrokenAnswerError
from kvasir_platform.bench.client.endpoint import CallResult


async def stream_completion(
    address: str, model: str, prompt: str, max_tokens: int, *, ignore_eos: bool = True
) -> CallResult:
    """POST /v1/completions with stream=true. Raise RuntimeError with the body of an error answer."""
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    result = CallResult(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        status = (await reader.readline()).decode()
        while (await reader.readline()).strip():
            pass
        if " 200 " not in status:
            raise RuntimeError(f"{status.strip()}: {(await reader.read(4096)).decode(errors='replace')}")
        await _read_events(reader, result)
        return result
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, result: CallResult) -> None:
    events = AnswerEvents(result)
    try:
        while line := await reader.readline():
            # The lengths of HTTP's chunks stand between the events' lines, which are whole.
            if line.startswith(b"data:"):
                events.feed(line, time.perf_counter())
            if events.ended:
                result.ended_s = time.perf_counter()
                return
    except BrokenAnswerError as error:
        raise RuntimeError(error.detail) from error
    raise RuntimeError("the stream ended without [DONE]")
