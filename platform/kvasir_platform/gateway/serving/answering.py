"""From a call to the answer that it wants: its form, streamed or whole, and what of its prompts is shown."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvasir.core.requests import Request
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer, AnswerHead, Prompt
from kvasir_platform.gateway.openai.answer_formats import AnswerFormat
from kvasir_platform.gateway.openai.calls import Call
from kvasir_platform.gateway.prompt.tokenization import Tokenizer


def answer_of(
    exchange: Exchange,
    call: Call,
    answers: AnswerFormat,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    *,
    created: int,
    now: Callable[[], float],
) -> Answer:
    """What answers `call`, which is these requests to the router. `created` is Unix time, and `now` reads the
    clock that the exchange's arrival is of."""
    tokens = [request.tokens for request in requests]
    wanted = call.sampling.max_tokens
    head = AnswerHead(
        id=answers.answer_id(exchange.request_id),
        created=created,
        model=call.model,
        choices=len(tokens) * call.sampling.n,
        logprobs=call.answer_logprobs,
        prompt_logprobs=call.answer_prompt_logprobs,
        tokens_as_ids=call.tokens_as_ids,
        include_usage=call.include_usage,
        continuous_usage=call.continuous_usage,
        prompts=_prompts(call, tokens, tokenizer),
        echo=call.echo,
        prompt_only=call.prompt_only,
        return_token_ids=call.return_token_ids,
        parsing=call.parsing,
        legacy_functions=call.legacy_functions,
        stops=call.sampling.stop,
        prompt_tokens=sum(map(len, tokens)),
        context_bound=wanted is not None
        and any((request.sampling.max_tokens or 0) < wanted for request in requests),
    )
    if not call.stream:
        return answers.whole(exchange, head)
    submitted = now()

    def timing() -> bytes:
        admit, first = submitted - exchange.arrival_s, now() - exchange.arrival_s
        return b"server-timing: admit;dur=%.2f, ttft;dur=%.2f\r\n" % (admit * 1e3, first * 1e3)

    return answers.streamed(exchange, head, timing)


def _prompts(call: Call, tokens: Sequence[array[int]], tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """What the answer may show of the prompts; nothing where it shows nothing."""
    if call.echo:
        return tuple(
            Prompt(ids, _text(call, prompt, ids, tokenizer), tokenizer.decode(ids[:1]))
            for prompt, ids in zip(call.prompts, tokens, strict=True)
        )
    if call.return_token_ids or call.continuous_usage or call.answer_prompt_logprobs is not None:
        return tuple(map(Prompt, tokens))
    return ()


def _text(call: Call, prompt: str | array[int], ids: array[int], tokenizer: Tokenizer) -> str:
    """The prompt as the model has it: what was cut off is not echoed."""
    if isinstance(prompt, str) and call.truncation is None:
        return prompt
    return tokenizer.decode(ids)
