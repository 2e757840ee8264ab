"""Continues another worker's output in vLLM: the prompt ends with that output, and vLLM's front must treat it
as output.

The engine core needs no change: the next token depends on the tokens before it. If it depends on more, the
leg is refused (refusals.py). Limits are reduced by the existing output (runtime.py).

The front detokenizes. Text that the lost worker held back, because it might begin a stop string or was half a
character, must be emitted as without a failure, so a continued request gets vLLM's own detokenizer, fed with
the output so far. vLLM has no interface for that. These private parts are used, and
tests/contract/test_vllm_continuation_hooks.py checks each of them:

    OutputProcessor.add_request(request, ...)        replaced on the instance
    OutputProcessor.request_states, .tokenizer       the request's state, right after it was added
    RequestState.detokenizer, .logprobs_processor    and `stream_interval` 1: every step is emitted whole
    IncrementalDetokenizer.from_new_request(tokenizer, request), .update, .min_tokens, .output_text,
        ._last_output_text_offset
    LogprobsProcessor.logprobs                       whose last tokens complete the characters that follow

A parser is fed the output so far in the lost worker's steps (`replay`), and its results are dropped. A
grammar is advanced over it in the engine core (core_grammars.py).
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
"""Key of the continuation in a request's `SamplingParams.extra_args`, which vLLM passes on unread."""

# Number of tokens that vLLM reads back to complete a character whose bytes are separate tokens.
_LOGPROBS_CONTEXT = 4


def as_argument(continuation: Continuation) -> list[int]:
    """Return the value of ARGUMENT."""
    return [continuation.output_tokens, continuation.text_length]


def install(processor: OutputProcessor) -> None:
    """Make `processor` continue requests that have ARGUMENT. Call once per engine.

    `add_request` then raises ValueError, and adds nothing, for a continuation that contradicts its tokens.
    """
    processor.add_request = partial(_add_request, processor, processor.add_request)


def replay(
    tokenizer: Any, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Return each token of `output`, which followed `prompt`, with the text that its step emitted."""
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
    """The attributes of the lost worker's request that a detokenizer reads."""

    sampling_params: Any
    prompt_token_ids: list[int]
    request_id: str = "continued"
    prompt_embeds: None = None


def _detokenizer(tokenizer: Any, params: Any, prompt: Sequence[int], there: int) -> Any:
    """Return a detokenizer for `there` tokens of existing output."""
    began: Any = _Began(params, list(prompt))
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer=tokenizer, request=began)
    # It counts the output so far; stop strings are not searched before it, if there was no text.
    detokenizer.min_tokens += there
    return detokenizer
