"""Converts a decoded body to a call: prompts, sampling parameters, and the form of the response.

Everything that the engine would refuse is checked here, so that an invalid request costs no worker anything
and its error names the field.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.checkpoint.sampling_defaults import NEUTRAL, SamplingDefaults
from kvasir.core.errors import RequestError
from kvasir.core.media.prompts import PromptMedia, kinds_of
from kvasir.core.requests import OutputParsing, Sampling, StructuredOutput, token_ids
from kvasir.core.values import value
from kvasir_platform.gateway.catalog.capabilities import TEXT_ONLY, ModelCapabilities, check_generates
from kvasir_platform.gateway.openai.conversation import TemplateMessage, template_messages
from kvasir_platform.gateway.openai.sampling import sampling
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.limits import (
    MAX_CHOICES,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPTS,
    bad,
    check_depth,
    unsupported,
)
from kvasir_platform.gateway.openai.schema.media_parts import chat_media
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields
from kvasir_platform.gateway.openai.schema.texts import CompletionBody
from kvasir_platform.gateway.openai.structured import structured
from kvasir_platform.gateway.openai.toolbox import Toolbox, parsing, toolbox
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens


@dataclass(frozen=True, slots=True)
class Truncation:
    """How to truncate a long prompt: to `tokens`, -1 for what fits the context, keeping its end, or its start
    with `keep_start`."""

    tokens: int
    keep_start: bool = False


@value
class Call:
    """One API call before tokenization. Each prompt is text or token ids; `n` choices are generated for each.

    `answer_logprobs` is the number of alternatives in the response, `answer_prompt_logprobs` that of each
    prompt token, None for none; with `tokens_as_ids` they name tokens as `token_id:N`. `parsing` is None if
    the output text is the content. `echo` puts the prompt before each choice; `prompt_only` omits the
    generated text, since an engine generates at least one token. `media` are those of a chat, in order.
    `continuous_usage` adds usage to every chunk. `legacy_functions` returns calls as `function_call`.
    """

    model: str
    prompts: tuple[str | array[int], ...]
    sampling: Sampling
    stream: bool
    include_usage: bool
    add_special_tokens: bool
    salt: str
    answer_logprobs: int | None = None
    answer_prompt_logprobs: int | None = None
    parsing: OutputParsing | None = None
    echo: bool = False
    prompt_only: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    continuous_usage: bool = False
    legacy_functions: bool = False
    truncation: Truncation | None = None
    priority: int = 0
    media: tuple[PromptMedia, ...] = ()

    @property
    def media_bytes(self) -> int:
        """Bytes of the media files."""
        return sum(len(item.data) for item in self.media)


@value
class ChatOptions:
    """How a chat is rendered, except for its messages and tools."""

    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None


def chat_call(
    body: ChatBody,
    template: ChatTemplate | None,
    vocabulary: int,
    capabilities: ModelCapabilities = TEXT_ONLY,
    defaults: SamplingDefaults = NEUTRAL,
    *,
    control: ControlTokens | None = None,
) -> Call:
    """Return the call of a chat request to a model with these `defaults`. With `control`, control tokens in
    the client's texts are ordinary text. Raise RequestError."""
    check_generates(capabilities, body.model)
    box = toolbox(body, capabilities)
    kwargs = _template_kwargs(body)
    media = chat_media(body.messages, capabilities, body.model)
    if media:
        _check_media(body, template, media)
    messages = template_messages(body.messages)
    options = ChatOptions(
        body.chat_template, body.add_generation_prompt, body.continue_final_message, body.documents
    )
    prompt = render_chat(
        messages,
        model=body.model,
        box=box,
        kwargs=kwargs,
        options=options,
        template=template,
        capabilities=capabilities,
        control=control,
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Call(
        model=body.model,
        prompts=(prompt,),
        sampling=sampling(
            body,
            limit=_or(body.max_completion_tokens, body.max_tokens),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            rule=_rule(body, box),
            vocabulary=vocabulary,
            capabilities=capabilities,
            defaults=defaults,
        ),
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        add_special_tokens=bool(body.add_special_tokens),
        salt=body.cache_salt or "",
        answer_logprobs=logprobs,
        answer_prompt_logprobs=body.prompt_logprobs,
        parsing=parsing(box, body, kwargs, capabilities),
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        continuous_usage=_continuous_usage(body),
        legacy_functions=box.legacy,
        truncation=_truncation(body),
        priority=body.priority or 0,
        media=media,
    )


def completion_call(
    body: CompletionBody,
    vocabulary: int,
    capabilities: ModelCapabilities = TEXT_ONLY,
    defaults: SamplingDefaults = NEUTRAL,
    control: ControlTokens | None = None,
) -> Call:
    """Return the call of a completion request to a model with these `defaults`. With `control`, control
    tokens in prompts are ordinary text. Raise RequestError."""
    check_generates(capabilities, body.model)
    prompts = prompts_of(body.prompt, vocabulary, "prompt", MAX_PROMPTS, control)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise bad(f"prompt × n makes more than {MAX_CHOICES} choices.", "n")
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise bad("max_tokens must be at least 1; 0 is for echo: true.", "max_tokens")
    prompt_only = body.max_tokens == 0
    prompt_logprobs = _or(body.prompt_logprobs, body.logprobs if echo else None)
    rule = structured(body)
    return Call(
        model=body.model,
        prompts=prompts,
        sampling=sampling(
            body,
            limit=1 if prompt_only else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            rule=None if rule is None else rule[0],
            vocabulary=vocabulary,
            capabilities=capabilities,
            defaults=defaults,
        ),
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        add_special_tokens=body.add_special_tokens is not False,
        salt=body.cache_salt or "",
        answer_logprobs=body.logprobs,
        answer_prompt_logprobs=body.prompt_logprobs,
        echo=echo,
        prompt_only=prompt_only,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        continuous_usage=_continuous_usage(body),
        truncation=_truncation(body),
        priority=body.priority or 0,
    )


def render_chat(
    messages: list[TemplateMessage],
    *,
    model: str,
    box: Toolbox,
    kwargs: Mapping[str, Any],
    options: ChatOptions,
    template: ChatTemplate | None,
    capabilities: ModelCapabilities,
    control: ControlTokens | None = None,
) -> str:
    """Return the rendered prompt of a chat: a UserText if, with `control`, the client wrote control tokens.
    Raise RequestError if the model has no template or it rejects the chat."""
    if template is None:
        raise unsupported("messages", f"The model {model!r} has no chat template; use /v1/completions.")
    if options.chat_template is not None:
        if not capabilities.client_templates:
            raise unsupported(
                "chat_template",
                "chat_template is disabled: it is code from the client (api.trust_chat_templates: false).",
            )
        template = template.of_client(options.chat_template)
    if options.continue_final_message and options.add_generation_prompt:
        raise bad(
            "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
        )
    if options.documents and not template.takes_documents:
        raise unsupported("documents", f"The chat template of {model!r} does not support documents.")
    if kwargs:
        check_depth(kwargs, "chat_template_kwargs")
    going_on = bool(options.continue_final_message)
    shown = template

    def render(messages: Sequence[Any], more: Sequence[Any]) -> str:
        variables, tools, documents = more
        return shown.render(
            messages,
            variables,
            tools or None,
            documents=documents or None,
            add_generation_prompt=options.add_generation_prompt is not False and not going_on,
            continue_final_message=going_on,
        )

    more = (kwargs, box.tools, options.documents)
    return render(messages, more) if control is None else control.rendered(messages, more, render)


def prompts_of(
    prompt: str | list[str | int | list[int]],
    vocabulary: int,
    param: str,
    limit: int,
    control: ControlTokens | None = None,
) -> tuple[str | array[int], ...]:
    """Return the texts or token ids of a `prompt` or `input`: a UserText for each text that, with `control`,
    has control tokens. Raise RequestError for more than `limit`."""
    if isinstance(prompt, str):
        return (prompt if control is None else control.prompt(prompt),)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise RequestError(f"{param} mixes text and token ids.", code="invalid_type", param=param)
    if int in kinds:
        return (_ids(prompt, vocabulary, param),)
    if len(prompt) > limit:
        raise bad(f"{param} has more than {limit} entries.", param)
    texts = str if control is None else control.prompt
    return tuple(
        texts(item) if isinstance(item, str) else _ids(item, vocabulary, f"{param}[{i}]")
        for i, item in enumerate(prompt)
    )


def check_kept(truncation: Truncation, context: int, output: int = 0) -> int:
    """Return how many tokens a truncation keeps. Raise RequestError for more than the context."""
    keep = truncation.tokens
    if keep < 0:
        keep = max(1, context - output)
    if keep > context:
        raise bad(
            f"truncate_prompt_tokens {keep} exceeds the model's context of {context} tokens.",
            "truncate_prompt_tokens",
        )
    return keep


def truncated(tokens: array[int], truncation: Truncation | None, context: int, output: int = 0) -> array[int]:
    """Return `tokens` truncated as requested; truncation to the context reserves room for `output` tokens.
    Raise RequestError for more tokens than the context."""
    if truncation is None:
        return tokens
    keep = check_kept(truncation, context, output)
    if len(tokens) <= keep:
        return tokens
    return tokens[:keep] if truncation.keep_start else tokens[len(tokens) - keep :]


def fit_context(
    sampling: Sampling, prompt_tokens: int, context: int, default_max_tokens: int, param: str
) -> Sampling:
    """Return `sampling` with its output limit set. Raise RequestError with the numbers if it exceeds the
    context. `param` is the field that holds the prompt."""
    if prompt_tokens == 0:
        raise bad("The prompt is empty.", param)
    room = context - prompt_tokens
    wanted = sampling.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = f" and max_tokens is {wanted}" if wanted is not None else ""
        raise RequestError(
            f"The model's context is {context} tokens; the prompt has {prompt_tokens}{asked}. "
            "Shorten the prompt or lower max_tokens.",
            code="context_length_exceeded",
            param=param,
        )
    limit = wanted if wanted is not None else min(room, default_max_tokens)
    if sampling.min_tokens > limit:
        raise bad(f"min_tokens {sampling.min_tokens} exceeds the output limit {limit}.", "min_tokens")
    if sampling.prompt_logprobs is not None:
        _check_prompt_logprobs(sampling.prompt_logprobs, prompt_tokens)
    return sampling if limit == wanted else replace(sampling, max_tokens=limit)


def with_room(sampling: Sampling, room: int) -> Sampling:
    """Return `sampling` with an output limit of at most `room` tokens, unchanged without any room."""
    wanted = sampling.max_tokens
    return replace(sampling, max_tokens=room) if wanted is not None and 0 < room < wanted else sampling


def _check_prompt_logprobs(alternatives: int, prompt_tokens: int) -> None:
    wanted = (alternatives + 1) * prompt_tokens
    if wanted > MAX_PROMPT_LOGPROBS:
        raise bad(
            f"prompt_logprobs make {wanted} entries for the {prompt_tokens} tokens of the prompt; "
            f"{MAX_PROMPT_LOGPROBS} are allowed.",
            "prompt_logprobs",
        )


def _check_media(body: ChatBody, template: ChatTemplate | None, media: Sequence[PromptMedia]) -> None:
    if body.truncate_prompt_tokens is not None:
        kind = media[0].kind.plural
        raise bad(f"A prompt with {kind} cannot be truncated.", "truncate_prompt_tokens")
    if template is not None and body.chat_template is None:
        for kind in kinds_of(media):
            if not template.takes(kind):
                raise bad(f"The chat template of {body.model!r} has no place for {kind.plural}.", "messages")


def _or(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def _include_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _continuous_usage(body: SamplingFields) -> bool:
    return _include_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)


def _truncation(body: SamplingFields) -> Truncation | None:
    if body.truncate_prompt_tokens is None:
        return None
    if body.truncate_prompt_tokens == 0:
        raise bad("truncate_prompt_tokens 0 would leave no prompt.", "truncate_prompt_tokens")
    return Truncation(body.truncate_prompt_tokens, body.truncation_side == "right")


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    """Return the variables of the template: those of the client, and the reasoning effort under the names
    that templates use."""
    kwargs = dict(body.chat_template_kwargs or ())
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs


def _rule(body: ChatBody, box: Toolbox) -> StructuredOutput | None:
    found = structured(body)
    if found is None:
        return None
    rule, param = found
    if box.forced:
        raise bad(f"{param} and the required tool call both constrain the output; send one.", param)
    return rule


def _ids(ids: Any, vocabulary: int, param: str) -> array[int]:
    if max(ids) >= vocabulary:
        raise bad(f"Token id {max(ids)} is beyond the vocabulary of {vocabulary}.", param)
    return token_ids(ids)
