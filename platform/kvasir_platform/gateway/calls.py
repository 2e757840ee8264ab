"""From a decoded body to what the router understands: prompts, sampling, and how to answer.

Sampling is checked here against what the engine would refuse, so that a bad request costs no worker
anything and its error names the field.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvasir.core.errors import RequestError
from kvasir.core.requests import Sampling, token_ids
from kvasir_platform.gateway.chat_template import ChatTemplate
from kvasir_platform.gateway.openai_schema import (
    MAX_CHOICES,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    Message,
    SamplingFields,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One API call, before tokenizing. Each prompt is text or ids; `n` choices are made of each.

    `answer_logprobs` is the number of alternatives that the answer shows, None for no logprobs.
    """

    model: str
    prompts: tuple[str | array[int], ...]
    sampling: Sampling
    chat: bool
    stream: bool
    include_usage: bool
    add_special_tokens: bool
    salt: str
    answer_logprobs: int | None = None


def chat_call(body: ChatBody, template: ChatTemplate | None, vocabulary: int) -> Call:
    """The call that a chat request makes. Raises RequestError."""
    if template is None:
        raise RequestError(
            f"The model {body.model!r} has no chat template; use /v1/completions.",
            code="unsupported_parameter",
            param="messages",
        )
    prompt = template.render([_template_message(m) for m in body.messages], body.chat_template_kwargs or {})
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    return Call(
        model=body.model,
        prompts=(prompt,),
        sampling=_sampling(body, limit, logprobs, vocabulary),
        chat=True,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        add_special_tokens=False,
        salt=body.cache_salt or "",
        answer_logprobs=logprobs,
    )


def completion_call(body: CompletionBody, vocabulary: int) -> Call:
    """The call that a completion request makes. Raises RequestError."""
    prompts = _prompts(body.prompt, vocabulary)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise _invalid(f"prompt × n makes more than {MAX_CHOICES} choices.", "n")
    return Call(
        model=body.model,
        prompts=prompts,
        sampling=_sampling(body, body.max_tokens, body.logprobs, vocabulary),
        chat=False,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        add_special_tokens=body.add_special_tokens is not False,
        salt=body.cache_salt or "",
        answer_logprobs=body.logprobs,
    )


def fit_context(
    sampling: Sampling, prompt_tokens: int, context: int, default_max_tokens: int, param: str
) -> Sampling:
    """`sampling` with its output limit set and found to fit, or RequestError with the numbers.
    `param` is the field that holds the prompt."""
    if prompt_tokens == 0:
        raise _invalid("The prompt is empty.", param)
    room = context - prompt_tokens
    wanted = sampling.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = f" and {wanted} of output were asked for" if wanted is not None else ""
        raise RequestError(
            f"The model's context is {context} tokens; the prompt has {prompt_tokens}{asked}. "
            "Shorten the prompt or lower max_tokens.",
            code="context_length_exceeded",
            param=param,
        )
    limit = wanted if wanted is not None else min(room, default_max_tokens)
    if sampling.min_tokens > limit:
        raise _invalid(f"min_tokens {sampling.min_tokens} exceeds the output limit {limit}.", "min_tokens")
    return replace(sampling, max_tokens=limit)


def _include_usage(body: SamplingFields) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise _invalid("stream_options needs stream: true.", "stream_options")
    return bool(body.stream_options.include_usage)


def _template_message(message: Message) -> Mapping[str, Any]:
    content = message.content
    shown: dict[str, Any] = {"role": message.role}
    if isinstance(content, list):
        shown["content"] = [{"type": "text", "text": part.text} for part in content]
    else:
        shown["content"] = content
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _prompts(prompt: str | list[str | int | list[int]], vocabulary: int) -> tuple[str | array[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes text and token ids.", code="invalid_type", param="prompt")
    if int in kinds:
        return (_ids(prompt, vocabulary, "prompt"),)
    if len(prompt) > MAX_PROMPTS:
        raise _invalid(f"prompt has more than {MAX_PROMPTS} entries.", "prompt")
    return tuple(
        item if isinstance(item, str) else _ids(item, vocabulary, f"prompt[{i}]")
        for i, item in enumerate(prompt)
    )


def _ids(ids: Any, vocabulary: int, param: str) -> array[int]:
    if max(ids) >= vocabulary:
        raise _invalid(f"Token id {max(ids)} is beyond the vocabulary of {vocabulary}.", param)
    return token_ids(ids)


def _sampling(body: SamplingFields, limit: int | None, logprobs: int | None, vocabulary: int) -> Sampling:
    temperature = _or(body.temperature, 1.0)
    n = body.n or 1
    if n > 1 and temperature == 0:
        raise _invalid("n must be 1 when temperature is 0: the choices would be equal.", "n")
    if limit is not None and (body.min_tokens or 0) > limit:
        raise _invalid(f"min_tokens {body.min_tokens} exceeds max_tokens {limit}.", "min_tokens")
    return Sampling(
        max_tokens=limit,
        min_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        n=n,
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=tuple(_known(body.stop_token_ids or (), vocabulary, "stop_token_ids")),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias, vocabulary) if body.logit_bias else (),
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _known(ids: Any, vocabulary: int, param: str) -> Any:
    for token in ids:
        if token >= vocabulary:
            raise _invalid(f"Token id {token} is beyond the vocabulary of {vocabulary}.", param)
    return ids


def _logit_bias(bias: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocabulary):
            raise _invalid(f"logit_bias key {key[:32]!r} is no token id below {vocabulary}.", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, code="invalid_value", param=param)
