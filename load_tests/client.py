"""A minimal streaming client for measurements, cheaper than what it measures.

It speaks HTTP/1.1 over one asyncio connection and reads server-sent events; API tests use the `openai`
package instead.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamResult:
    """One streamed completion. Times are seconds on this client's clock, measured from just before the
    request is sent."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, object] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return int(str(self.usage.get("completion_tokens", 0)))


async def stream_completion(
    address: str, model: str, prompt: str, max_tokens: int, *, ignore_eos: bool = True
) -> StreamResult:
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
    began = time.perf_counter()
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
        return await _read_events(reader, began)
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, began: float) -> StreamResult:
    result = StreamResult()
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        elapsed = time.perf_counter() - began
        payload = line[6:].strip()
        if payload == b"[DONE]":
            result.total_s = elapsed
            return result
        event = json.loads(payload)
        if event.get("usage"):
            result.usage = event["usage"]
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        if event.get("choices"):
            if not result.chunk_times_s:
                result.ttft_s = elapsed
            result.chunk_times_s.append(elapsed)
            result.text += event["choices"][0].get("text", "")
    raise RuntimeError("the stream ended without [DONE]")
