"""The lines of a batch's file: which there are, and what is wrong with them."""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvasir.core.errors import KvasirError, RequestError
from kvasir_platform.gateway.batches.schema import BatchError
from kvasir_platform.gateway.http.body import Body
from kvasir_platform.gateway.openai.schema.decode import decode_body
from kvasir_platform.gateway.openai.schema.limits import bad, unsupported

_MAX_ERRORS = 100


class BatchLine(Struct, kw_only=True, frozen=True):
    """One request. `body` is the JSON that its endpoint takes."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class _Flags(Struct, frozen=True):
    """What the body of a line may not ask for."""

    model: str = ""
    stream: bool | None = None
    background: bool | None = None


_LINE = msgspec.json.Decoder(BatchLine)
_FLAGS = msgspec.json.Decoder(_Flags)


class BatchLines:
    """The lines of a file that are not empty."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._starts = array("Q")
        self._ends = array("Q")
        at, size = 0, len(content)
        while at < size:
            end = content.find(b"\n", at)
            end = size if end < 0 else end
            if content[at:end].strip():
                self._starts.append(at)
                self._ends.append(end)
            at = end + 1

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, number: int) -> bytes:
        """Return a line as it is in the file, the first being 0."""
        return self._content[self._starts[number] : self._ends[number]]

    def line(self, number: int) -> BatchLine:
        """Return a line. Raise RequestError if it is no request."""
        return decode_body(_LINE, self.raw(number))

    def errors(self, endpoint: str, max_lines: int, max_line_bytes: int) -> list[BatchError]:
        """Return the first errors of a file whose lines are to call `endpoint`."""
        if not len(self):
            return [BatchError("empty_file", "The file has no lines.", None, None)]
        if len(self) > max_lines:
            message = f"The file has {len(self)} lines; {max_lines} are allowed."
            return [BatchError("too_many_lines", message, None, None)]
        found: list[BatchError] = []
        seen: set[str] = set()
        for number in range(len(self)):
            try:
                self._check(number, endpoint, max_line_bytes, seen)
            except KvasirError as error:
                param = error.param if isinstance(error, RequestError) else None
                found.append(BatchError(error.code, error.message, param, number + 1))
                if len(found) == _MAX_ERRORS:
                    break
        return found

    def model(self) -> str | None:
        """Return the model of the first line."""
        return decode_body(_FLAGS, bytes(self.line(0).body)).model or None

    def _check(self, number: int, endpoint: str, max_bytes: int, seen: set[str]) -> None:
        raw = self.raw(number)
        if len(raw) > max_bytes:
            raise bad(f"The line has {len(raw)} bytes; {max_bytes} are allowed.", "body")
        Body().add(raw)
        line = self.line(number)
        if line.custom_id in seen:
            raise RequestError(
                f"custom_id {line.custom_id[:64]!r} occurs more than once.",
                code="duplicate_custom_id",
                param="custom_id",
            )
        seen.add(line.custom_id)
        if line.method != "POST":
            raise bad("method must be POST.", "method")
        if line.url != endpoint:
            raise bad(f"url must be the batch's endpoint, {endpoint}.", "url")
        flags = decode_body(_FLAGS, bytes(line.body))
        if flags.stream:
            raise unsupported("body.stream", "The lines of a batch are not streamed.")
        if flags.background:
            raise unsupported("body.background", "A line of a batch is no background response.")
