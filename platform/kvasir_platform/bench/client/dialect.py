"""The requests that a server accepts. Pure.

Servers that speak OpenAI's API differ in the fields that they accept: vLLM, SGLang and Kvasir know
`ignore_eos`, OpenAI does not, and newer models of it want `max_completion_tokens`. A benchmark begins with
what gives the most exact figures, and leaves out what a server refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvasir_platform.bench.client.endpoint import BenchCall

Api = Literal["chat", "completions", "embeddings"]
_PATHS: Mapping[Api, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
_REFUSED = (400, 404, 422)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls are written. `ignore_eos`: outputs have exactly the length asked for. `usage`: a stream ends
    with the server's counts of tokens. `limit` is the field of the longest output."""

    api: Api
    ignore_eos: bool = True
    usage: bool = True
    limit: str = "max_tokens"

    @property
    def path(self) -> str:
        """Where calls are sent."""
        return _PATHS[self.api]

    def body(self, model: str, call: BenchCall, more: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a call. `more` are fields of the user, which have the last word."""
        if self.api == "embeddings":
            return {"model": model, "input": call.prompt, **more}
        body: dict[str, Any] = {"model": model, "stream": True, self.limit: call.output_tokens}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": call.prompt}]
        else:
            body["prompt"] = call.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        return body | dict(more)

    def narrowed(self, status: int, said: str) -> Dialect | None:
        """What to try after the server refused a call with this status and message; None: nothing is left to
        leave out. A field that the message names goes first."""
        if status not in _REFUSED or self.api == "embeddings":
            return None
        smaller: dict[str, Dialect] = {}
        if self.ignore_eos:
            smaller["ignore_eos"] = replace(self, ignore_eos=False)
        if self.usage:
            smaller["stream_options"] = replace(self, usage=False)
        if self.limit == "max_tokens" and self.api == "chat":
            smaller["max_tokens"] = replace(self, limit="max_completion_tokens")
        named = next((each for name, each in smaller.items() if name in said), None)
        return named or next(iter(smaller.values()), None)

    def left_out(self) -> tuple[str, ...]:
        """What the server refused, in words for the report."""
        if self.api == "embeddings":
            return ()
        found = []
        if not self.ignore_eos:
            found.append("ignore_eos: outputs may be shorter than asked for")
        if not self.usage:
            found.append("stream_options: tokens are counted as chunks")
        if self.limit != "max_tokens":
            found.append(f"max_tokens: {self.limit} is sent")
        return tuple(found)
