"""The response object: what it repeats of its call, its output, its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import FinishReason, Usage
from kvasir_platform.gateway.http.errors import error_status
from kvasir_platform.gateway.openai.answer import AnswerHead
from kvasir_platform.gateway.responses.body import ResponsesBody
from kvasir_platform.gateway.responses.output_items import OutputItems

Response = dict[str, Any]

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
FAILED, CANCELLED, QUEUED = "failed", "cancelled", "queued"
_INCOMPLETE_REASONS = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """How a response ended: with `usage`, or with `error`. `at` is Unix time."""

    at: int
    usage: Usage | None = None
    error: KvasirError | None = None


def response_object(
    asked: ResponsesBody,
    head: AnswerHead,
    output: OutputItems,
    end: ResponseEnd | None = None,
    *,
    stored: bool,
    status: str = IN_PROGRESS,
) -> Response:
    """Return the response to `asked` so far, with `end` at its end. `stored`: whether it can be read
    later; `status` is that of a response that goes on."""
    cut = None
    if end is not None:
        cut = None if output.finish is None else _INCOMPLETE_REASONS.get(output.finish)
        status = FAILED if end.error is not None else COMPLETED if cut is None else INCOMPLETE
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": bool(asked.background),
        "completed_at": end.at if end is not None and status == COMPLETED else None,
        "error": None if end is None or end.error is None else response_error(end.error),
        "incomplete_details": {"reason": cut} if status == INCOMPLETE else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "model": head.model,
        "output": [] if end is None else output.items,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {
            "effort": None if asked.reasoning is None else asked.reasoning.effort,
            "summary": None,
        },
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": _format(asked)},
        "tool_choice": msgspec.to_builtins(asked.tool_choice) if asked.tool_choice else "auto",
        "tools": [_tool(tool) for tool in msgspec.to_builtins(asked.tools or [])],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None if end is None or end.usage is None else _usage(end.usage, output),
        "user": asked.user,
        "metadata": asked.metadata or {},
    }


def response_error(error: KvasirError) -> dict[str, str]:
    """Return the error of a response. OpenAI's API has a closed list of codes; ours is in the message."""
    code = "rate_limit_exceeded" if error_status(error) == 429 else "server_error"
    return {"code": code, "message": f"{error.message} ({error.code})"}


def _usage(usage: Usage, output: OutputItems) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _format(asked: ResponsesBody) -> dict[str, Any]:
    form = None if asked.text is None else asked.text.format
    if form is None:
        return {"type": "text"}
    shown: dict[str, Any] = msgspec.to_builtins(form)
    return {name: value for name, value in shown.items() if value is not None}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": tool["type"],
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["parameters"],
        "strict": bool(tool["strict"]),
    }
