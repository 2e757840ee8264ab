"""Sends the completions of a calibration, and reads the server's own timings of each."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.common.gateway_client import reason_in
from kvasir_platform.cli.verify.client import VerifyClient
from kvasir_platform.gateway.catalog.slo_classes import TIMING_HEADER

_LINE_LIMIT = 64 << 20
_PART = re.compile(r"\b(\w+);dur=([\d.]+)")
_MOVED = re.compile(r'\btransfer;dur=[\d.]+;desc="(\d+) bytes"')


@dataclass(frozen=True, slots=True)
class TimedStream:
    """A streamed answer of `tokens` tokens. `began_s` is when it was sent and `times_s` when each event with
    output came, by this client's clock; `server` is what the gateway says of its parts (Server-Timing), in
    seconds, empty from a gateway that says nothing. `moved_bytes` of KV came from another worker."""

    began_s: float
    times_s: tuple[float, ...]
    tokens: int
    server: Mapping[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    moved_bytes: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token by the gateway, else by this client."""
        return self.server.get("ttft", self.times_s[0] - self.began_s)


class CalibrationClient(VerifyClient):
    """As VerifyClient, with answers that are timed by the server."""

    def timed(self, prompt: Sequence[int], max_tokens: int) -> TimedStream:
        """Stream a completion of exactly `max_tokens` tokens. Raises UpstreamError."""
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        body = self._body(prompt, max_tokens) | asked
        began, said, times = time.perf_counter(), "", []
        usage: dict[str, Any] = {}
        with self._connected() as sent:
            response = sent.post("/v1/completions", body, self._headers | {TIMING_HEADER: "comment"})
            if response.status != 200:
                raise self._refused("/v1/completions", response.status, response.read(_LINE_LIMIT))
            while line := response.readline(_LINE_LIMIT):
                if line.startswith(b": server-timing"):
                    said = line.decode("ascii", "replace")
                elif line.startswith(b"data: [DONE]"):
                    break
                elif b'"error"' in line[:20]:
                    raise UpstreamError(f"a stream broke off: {reason_in(line[6:])}")
                elif b'"choices":[]' in line:
                    usage = json.loads(line[6:]).get("usage") or {}
                elif line.startswith(b"data: {"):
                    times.append(time.perf_counter())
            else:
                raise UpstreamError("a stream ended without [DONE]")
        if not times:
            raise UpstreamError("a stream had no token")
        moved = _MOVED.search(said)
        return TimedStream(
            began,
            tuple(times),
            max_tokens,
            server={name: float(ms) / 1e3 for name, ms in _PART.findall(said)},
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            moved_bytes=0 if moved is None else int(moved[1]),
        )


def mean_itl_s(found: Sequence[TimedStream]) -> float | None:
    """Return the mean time between tokens of streams while all of them ran, None if they never did."""
    begins, ends = max(each.times_s[0] for each in found), min(each.times_s[-1] for each in found)
    counted = sum(begins < each <= ends for each in itertools.chain(*(one.times_s for one in found)))
    return (ends - begins) * len(found) / counted if counted else None
