"""What load is put on: the port between the load generator and HTTP."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BenchCall:
    """One call: its prompt, and the output tokens that it asks for; an embedding has none."""

    prompt: str
    output_tokens: int
    embeds: bool = False


@dataclass(slots=True)
class CallResult:
    """What came of a call. Times are seconds on the endpoint's clock. `chunks` are the times at which chunks
    with output came. Counts of tokens are the server's, None if it told none. `error` is its kind, empty if
    there was none, and `detail` what the server or the connection said."""

    started_s: float
    ended_s: float = 0.0
    chunks: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first chunk with output, or to the end of an answer that is not streamed."""
        return (self.chunks[0] if self.chunks else self.ended_s) - self.started_s


class BenchEndpoint(Protocol):
    """Sends calls. Many run at a time."""

    async def send(self, call: BenchCall) -> CallResult:
        """Send it and await its end. Errors are in the result; only cancellation is raised."""
        ...
