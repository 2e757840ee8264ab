"""Converts the sampling fields of a body to engine parameters and checks them against the engine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvasir.checkpoint.sampling_defaults import SamplingDefaults
from kvasir.core.requests import Sampling, StructuredOutput
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.openai.schema.limits import MAX_CHOICES_BAD_WORDS, bad, unsupported
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields


def sampling(
    body: SamplingFields,
    *,
    limit: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    rule: StructuredOutput | None,
    vocabulary: int,
    capabilities: ModelCapabilities,
    defaults: SamplingDefaults,
) -> Sampling:
    """Return the sampling parameters of `body`, with the model's `defaults` for those that it leaves out.
    `limit` is the maximum of output tokens, None for the default, `logprobs` and `prompt_logprobs` the number
    of alternatives, `rule` the output constraint. Raise RequestError."""
    temperature = _or(body.temperature, defaults.temperature)
    return Sampling(
        max_tokens=_limit(body, limit),
        min_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_p=_or(body.top_p, defaults.top_p),
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        min_p=_or(body.min_p, defaults.min_p),
        n=_choices(body, temperature),
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=tuple(_known(body.stop_token_ids or (), vocabulary, "stop_token_ids")),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=_or(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias, vocabulary) if body.logit_bias else (),
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        allowed_token_ids=tuple(_known(body.allowed_token_ids or (), vocabulary, "allowed_token_ids")),
        bad_words=_bad_words(body.bad_words, body.n or 1),
        prompt_logprobs=prompt_logprobs,
        thinking_tokens=_thinking(body.thinking_token_budget, capabilities),
        structured=rule,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _limit(body: SamplingFields, limit: int | None) -> int | None:
    if limit is not None and (body.min_tokens or 0) > limit:
        raise bad(f"min_tokens {body.min_tokens} exceeds max_tokens {limit}.", "min_tokens")
    return limit


def _choices(body: SamplingFields, temperature: float) -> int:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise unsupported("best_of", f"best_of {body.best_of} is not supported other than equal to n, {n}.")
    if n > 1 and temperature == 0:
        raise bad("n must be 1 when temperature is 0: the choices would be equal.", "n")
    return n


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _known(ids: Iterable[int], vocabulary: int, param: str) -> Iterable[int]:
    for token in ids:
        if token >= vocabulary:
            raise bad(f"Token id {token} is beyond the vocabulary of {vocabulary}.", param)
    return ids


def _logit_bias(bias: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocabulary):
            raise bad(f"logit_bias key {key[:32]!r} is not a token id below {vocabulary}.", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _bad_words(words: list[str] | None, n: int) -> tuple[str, ...]:
    if len(words or ()) * n > MAX_CHOICES_BAD_WORDS:
        raise bad(f"bad_words × n exceeds {MAX_CHOICES_BAD_WORDS}.", "bad_words")
    for i, word in enumerate(words or ()):
        if not word.strip():
            raise bad("bad_words may not be blank.", f"bad_words[{i}]")
    return tuple(words or ())


def _thinking(budget: int | None, capabilities: ModelCapabilities) -> int | None:
    if budget is None or budget < 0:
        return None
    if not capabilities.reasoning:
        raise unsupported(
            "thinking_token_budget",
            "thinking_token_budget needs engine.reasoning_parser, which detects reasoning.",
        )
    return budget
