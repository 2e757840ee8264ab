"""Checks and deltas shared by all engines of embed pools."""

from __future__ import annotations

from collections.abc import Container

from kvasir.core.requests import Delta, EngineRequest, FinishReason, Leg, Timings, Usage


def refusal(request: EngineRequest, *, adapters: Container[str], max_tokens: int) -> tuple[str, str] | None:
    """Return the code and the message of the first rule that `request` breaks, None if it breaks none."""
    if request.leg is not Leg.EMBED:
        return "invalid_request", f"this worker makes embeddings, and runs no {request.leg} leg"
    if not request.tokens:
        return "invalid_request", "the input is empty"
    if len(request.tokens) > max_tokens:
        return (
            "context_length_exceeded",
            f"the input has {len(request.tokens)} tokens; at most {max_tokens} fit",
        )
    if request.adapter is not None and request.adapter not in adapters:
        return "invalid_request", f"adapter {request.adapter!r} is not loaded on this worker"
    return None


def ended(
    request: EngineRequest, finish: FinishReason, code: str | None = None, message: str | None = None
) -> Delta:
    """Return the last delta of an input that was refused, stopped or lost."""
    return Delta(
        request_id=request.request_id,
        offset=0,
        finish=finish,
        last=True,
        usage=Usage(prompt_tokens=len(request.tokens)),
        timings=Timings(),
        error=code,
        error_message=message,
    )
