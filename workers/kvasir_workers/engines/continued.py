"""Checks of a leg that continues the output of a lost worker, shared by all engines."""

from __future__ import annotations

from kvasir.core.requests import EngineRequest, Leg


def continued_tokens(request: EngineRequest) -> int:
    """Return how many of the leg's tokens are output that the client has: its first delta's offset."""
    return 0 if request.continuation is None else request.continuation.output_tokens


def continuation_fault(request: EngineRequest) -> str | None:
    """Return why `request` cannot be continued, or None."""
    continuation = request.continuation
    if continuation is None:
        return None
    output, sampling = continuation.output_tokens, request.sampling
    if request.leg is Leg.PREFILL:
        return "a prefill leg has no output to continue: send the tokens without a continuation"
    if sampling.n > 1:
        return f"a continuation has one choice, and n is {sampling.n}: restart the request"
    if not 0 < output < len(request.tokens) or continuation.text_length < 0:
        return (
            f"{output} tokens with {continuation.text_length} characters cannot be the output that ends the "
            f"leg's {len(request.tokens)} tokens: it comes after a prompt, and is not empty"
        )
    if sampling.max_tokens is not None and output >= sampling.max_tokens:
        return (
            f"the continuation has {output} tokens of output and max_tokens is {sampling.max_tokens}: "
            "nothing is left to generate"
        )
    return None


def text_fault(text_length: int, known: int) -> str:
    """Return the refusal of a continuation whose client has `text_length` characters but whose tokens have
    only `known`."""
    return f"the client has {text_length} characters, and the tokens of the continuation only {known}"
