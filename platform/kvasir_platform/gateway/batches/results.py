"""What a batch's files say of a line: its answer, its error, or why it did not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from msgspec import Struct

from kvasir_platform.gateway.batches.line_exchange import LineExchange
from kvasir_platform.gateway.batches.lines import BatchLines
from kvasir_platform.gateway.batches.schema import BatchObject, BatchUsage, InputDetails, OutputDetails
from kvasir_platform.gateway.batches.storage.journal import LineResult

BatchEnd = Literal["completed", "expired", "cancelled"]
_WHY = {
    "expired": ("batch_expired", "This request was not executed before the completion window ended."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}


class _LineResponse(Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(Struct):
    code: str
    message: str


class _ShownLine(Struct):
    id: str
    custom_id: str
    response: _LineResponse | None
    error: _LineError | None


class _Cached(Struct):
    cached_tokens: int = 0


class _Reasoning(Struct):
    reasoning_tokens: int = 0


class _Usage(Struct):
    """The usage of any endpoint."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    input_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoning | None = None
    output_tokens_details: _Reasoning | None = None


class _Used(Struct):
    usage: _Usage | None = None


_USED = msgspec.json.Decoder(_Used)
_encode = msgspec.json.Encoder().encode


def result_of(exchange: LineExchange) -> LineResult:
    """Return the result of a line that was answered."""
    ok = exchange.status == 200
    name = exchange.request_id
    response = _LineResponse(exchange.status, name, msgspec.Raw(exchange.answer))
    shown = _encode(_ShownLine(f"batch_req_{name}", exchange.custom_id, response, None))
    usage = (_USED.decode(exchange.answer).usage if ok else None) or _Usage()
    cached = usage.prompt_tokens_details or usage.input_tokens_details or _Cached()
    reasoning = usage.completion_tokens_details or usage.output_tokens_details or _Reasoning()
    tokens = (
        usage.prompt_tokens + usage.input_tokens,
        cached.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
        reasoning.reasoning_tokens,
    )
    return LineResult(exchange.number, ok, tokens, msgspec.Raw(shown))


def counted(batch: BatchObject, results: list[LineResult], *, anew: bool = False) -> BatchObject:
    """Return a batch with its results counted, `anew` from all of them."""
    counts = batch.request_counts
    if anew:
        counts.completed = counts.failed = 0
        batch.usage = BatchUsage.none()
    for result in results:
        counts.completed += result.ok
        counts.failed += not result.ok
        batch.usage = _add_usage(batch.usage, result)
    return batch


def output_pieces(results: Iterable[LineResult]) -> Iterator[bytes]:
    """Yield the output file."""
    for result in results:
        if result.ok:
            yield bytes(result.shown) + b"\n"


def error_pieces(results: Iterable[LineResult], lines: BatchLines, end: BatchEnd) -> Iterator[bytes]:
    """Yield the error file: the lines that failed, and those that did not run."""
    left = bytearray(b"\1" * len(lines))
    for result in results:
        left[result.number] = 0
        if not result.ok:
            yield bytes(result.shown) + b"\n"
    if end == "completed":
        return
    error = _LineError(*_WHY[end])
    for number in range(len(lines)):
        if left[number]:
            yield (
                _encode(_ShownLine(f"batch_req_{number}", lines.line(number).custom_id, None, error)) + b"\n"
            )


def _add_usage(usage: BatchUsage, result: LineResult) -> BatchUsage:
    """Return the usage of a batch with one more result."""
    tokens_in, cached, tokens_out, reasoning = result.usage
    return BatchUsage(
        usage.input_tokens + tokens_in,
        InputDetails(usage.input_tokens_details.cached_tokens + cached),
        usage.output_tokens + tokens_out,
        OutputDetails(usage.output_tokens_details.reasoning_tokens + reasoning),
        usage.total_tokens + tokens_in + tokens_out,
    )
