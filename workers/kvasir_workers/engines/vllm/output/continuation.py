"""How vLLM goes on with output that another worker began: its prompt ends with that output, and its front
must count and read it as output.

The engine core needs nothing: the next token depends on the tokens before it. Where it depends on more,
the leg is refused (refusals.py). Limits are lowered by the output that is there (runtime.py).

The front detokenizes. Text that the lost worker held back, because it might begin a stop string or was half
a character, must come out as if nothing had happened, so a continued request is given vLLM's own
detokenizer, fed with the output so far. vLLM has no door for that. These of its private parts are used, and
tests/contract/test_vllm_continuation_hooks.py holds each of them:

    OutputProcessor.add_request(request, ...)        replaced on the instance
    OutputProcessor.request_states, .tokenizer       the request's state, right after it was added
    RequestState.detokenizer, .logprobs_processor    and `stream_interval` 1: every step is put out whole
    IncrementalDetokenizer.from_new_request(tokenizer, request), .update, .min_tokens, .output_text,
        ._last_output_text_offset
    LogprobsProcessor.logprobs                       whose last tokens complete the characters that follow

A parser is told the output so far as the lost worker told it, step by step (`replay`), and what it makes of
that is dropped. A grammar is advanced over it in the engine core (core_grammars.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from kvasir.core.requests import Continuation
from kvasir_workers.engines.continued import text_fault

ARGUMENT = "kvasir_continuation"
"""Names the continuation among a request's `SamplingParams.extra_args`, which vLLM passes on unread."""

# What vLLM looks back at to complete a character whose bytes are tokens of their own.
_LOGPROBS_CONTEXT = 4


def as_argument(continuation: Continuation) -> list[int]:
    """The value of ARGUMENT."""
    return [continuation.output_tokens, continuation.text_length]


def install(processor: OutputProcessor) -> None:
    """Have `processor` continue requests that carry ARGUMENT. Once per engine.

    `add_request` then raises ValueError, and adds nothing, for a continuation that its tokens contradict.
    """
    processor.add_request = partial(_add_request, processor, processor.add_request)


def replay(
    tokenizer: Any, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Each token of `output`, which followed `prompt`, with the text that its step gave out."""
    detokenizer = _detokenizer(tokenizer, params, prompt, len(output))
    for token in output:
        detokenizer.update([token], False)
        yield token, detokenizer.get_next_output_text(finished=False, delta=True)


def _add_request(
    processor: OutputProcessor, add: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any
) -> None:
    params = request.sampling_params
    said = (params.extra_args or {}).get(ARGUMENT) if params is not None else None
    if said is None:
        add(request, *args, **kwargs)
        return
    count, text_length = said
    prompt, output = request.prompt_token_ids[:-count], list(request.prompt_token_ids[-count:])
    detokenizer = _detokenizer(processor.tokenizer, params, prompt, count)
    detokenizer.update(output, False)
    if text_length > len(detokenizer.output_text):
        raise ValueError(text_fault(text_length, len(detokenizer.output_text)))
    detokenizer._last_output_text_offset = text_length
    add(request, *args, **kwargs)
    state = processor.request_states[request.request_id]
    state.detokenizer = detokenizer
    if state.logprobs_processor.logprobs is not None:
        context = ({token: Logprob(logprob=0.0)} for token in output[-_LOGPROBS_CONTEXT:])
        state.logprobs_processor.logprobs.extend(context)


@dataclass
class _Began:
    """What a detokenizer reads of the request that the lost worker had."""

    sampling_params: Any
    prompt_token_ids: list[int]
    request_id: str = "continued"
    prompt_embeds: None = None


def _detokenizer(tokenizer: Any, params: Any, prompt: Sequence[int], there: int) -> Any:
    """One that will read `there` tokens of output before any that is generated here."""
    began: Any = _Began(params, list(prompt))
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer=tokenizer, request=began)
    # Counted with the output so far; nor is a stop string looked for before it, where there was none.
    detokenizer.min_tokens += there
    return detokenizer
