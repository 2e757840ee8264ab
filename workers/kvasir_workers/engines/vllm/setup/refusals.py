"""Legs that vLLM cannot run, and their error messages."""

from __future__ import annotations

from collections.abc import Container

from kvasir.core.requests import EngineRequest, Leg
from kvasir_workers.engines.continued import continuation_fault


def invalid(
    request: EngineRequest, *, adapters: Container[str], disaggregated: bool, reasons: bool = False
) -> str | None:
    """Return the first rule that `request` breaks on a worker with these adapters, or None; `reasons`: it has
    a parser of reasoning."""
    if request.adapter is not None and request.adapter not in adapters:
        return f"adapter {request.adapter!r} is not loaded on this worker"
    return (
        _invalid_leg(request, disaggregated=disaggregated)
        or _unanswerable(request, reasons=reasons)
        or continuation_fault(request)
        or _inexact(request)
    )


def _invalid_leg(request: EngineRequest, *, disaggregated: bool) -> str | None:
    if request.leg is Leg.FULL:
        return None
    if request.leg is Leg.EMBED:
        return "this worker generates: embeddings are made by pools of role embed"
    if not disaggregated:
        return "this worker moves no KV: disaggregation is never"
    if request.leg is Leg.DECODE and request.handoff is None:
        return "a decode leg needs the hand-off of its prefill leg"
    if request.leg is Leg.DECODE and request.sampling.n > 1:
        return "n > 1 runs aggregated: one lease is pulled once"
    return None


def _unanswerable(request: EngineRequest, *, reasons: bool) -> str | None:
    if request.sampling.thinking_tokens is not None and not reasons and request.leg is not Leg.PREFILL:
        return "a bound on reasoning needs engine.reasoning_parser, and this pool has none"
    if request.sampling.prompt_logprobs is not None and request.leg is Leg.DECODE:
        return "log-probabilities of the prompt need the whole prompt computed here: send a full leg"
    return None


def _inexact(request: EngineRequest) -> str | None:
    """Return why vLLM cannot continue the leg exactly: what the next token depends on besides the tokens
    before it.

    The state of a seeded generator is its number of draws, which cannot be set from outside. Presence and
    frequency penalties count only output, and vLLM treats another worker's output as prompt; a repetition
    penalty counts both alike. Forbidden words are searched in the output too, as is the mark that ends
    bounded reasoning, of which the client may have a part.
    """
    sampling = request.sampling
    if request.continuation is None:
        return None
    if sampling.seed is not None and sampling.temperature > 0:
        return "seeded draws cannot be continued: restart the request"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "presence and frequency penalties cannot be continued: restart the request"
    if sampling.bad_words:
        return "bad_words cannot be continued: restart the request"
    if sampling.thinking_tokens is not None:
        return "bounded reasoning cannot be continued: restart the request"
    return None
