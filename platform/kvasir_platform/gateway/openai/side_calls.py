"""Calls without generation: embeddings, classes, tokenize and detokenize."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import token_ids
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities, check_classifies, check_embeds
from kvasir_platform.gateway.openai.calls import ChatOptions, Truncation, prompts_of, render_chat
from kvasir_platform.gateway.openai.conversation import template_messages
from kvasir_platform.gateway.openai.schema.limits import MAX_INPUTS, bad
from kvasir_platform.gateway.openai.schema.media_parts import chat_media
from kvasir_platform.gateway.openai.schema.scoring import ClassifyBody
from kvasir_platform.gateway.openai.schema.texts import DetokenizeBody, EmbeddingBody, TokenizeBody
from kvasir_platform.gateway.openai.toolbox import Toolbox, template_tools
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """Inputs to embed, each text or token ids, in order. `base64` returns little-endian float32 in base64;
    `dimensions` is the requested number of dimensions, None for all."""

    model: str
    inputs: tuple[str | array[int], ...]
    base64: bool
    dimensions: int | None
    add_special_tokens: bool
    truncation: Truncation | None
    priority: int

    def param(self, index: int) -> str:
        """Return the field of an input."""
        return "input" if len(self.inputs) == 1 else f"input[{index}]"


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text to tokenize, with these media. `show_strings` also returns the tokens as strings."""

    text: str
    add_special_tokens: bool
    show_strings: bool
    media: tuple[PromptMedia, ...] = ()


def embedding_call(
    body: EmbeddingBody,
    vocabulary: int,
    capabilities: ModelCapabilities,
    control: ControlTokens | None = None,
) -> EmbeddingCall:
    """Return the call for the body of an embeddings request. With `control`, control tokens in inputs are
    ordinary text. Raise RequestError."""
    check_embeds(capabilities, body.model)
    return _inputs_call(
        body, vocabulary, control, base64=body.encoding_format == "base64", dimensions=body.dimensions
    )


def classify_call(
    body: ClassifyBody,
    vocabulary: int,
    capabilities: ModelCapabilities,
    control: ControlTokens | None = None,
) -> EmbeddingCall:
    """Return the call for the body of a classify request, as `embedding_call` does."""
    check_classifies(capabilities, body.model)
    return _inputs_call(body, vocabulary, control)


def _inputs_call(
    body: EmbeddingBody | ClassifyBody,
    vocabulary: int,
    control: ControlTokens | None,
    *,
    base64: bool = False,
    dimensions: int | None = None,
) -> EmbeddingCall:
    inputs = prompts_of(body.input, vocabulary, "input", MAX_INPUTS, control)
    for i, each in enumerate(inputs):
        if not each:
            raise bad("An input is empty.", f"input[{i}]" if isinstance(body.input, list) else "input")
    return EmbeddingCall(
        model=body.model,
        inputs=inputs,
        base64=base64,
        dimensions=dimensions,
        add_special_tokens=body.add_special_tokens is not False,
        truncation=_truncation(body),
        priority=body.priority or 0,
    )


def tokenize_call(
    body: TokenizeBody,
    model: str,
    template: ChatTemplate | None,
    capabilities: ModelCapabilities,
    control: tuple[ControlTokens | None, ControlTokens | None] = (None, None),
) -> TokenizeCall:
    """Return the call for the body of a tokenize request to `model`. `control` has the control tokens that
    are ordinary text in prompts, and in chats. Raise RequestError."""
    strings = bool(body.return_token_strs)
    in_prompts, in_chats = control
    if body.messages is None:
        text = body.prompt or ""
        shown = text if in_prompts is None else in_prompts.prompt(text)
        return TokenizeCall(shown, body.add_special_tokens is not False, strings)
    media = chat_media(body.messages, capabilities, model)
    text = render_chat(
        template_messages(body.messages),
        model=model,
        box=Toolbox(template_tools(body.tools or ())),
        kwargs=body.chat_template_kwargs or {},
        options=ChatOptions(body.chat_template, body.add_generation_prompt, body.continue_final_message),
        template=template,
        capabilities=capabilities,
        control=in_chats,
    )
    return TokenizeCall(text, bool(body.add_special_tokens), strings, media)


def detokenize_ids(body: DetokenizeBody, vocabulary: int) -> array[int]:
    """Return the ids to detokenize. Raise RequestError for an id outside the vocabulary."""
    for token in body.tokens:
        if token >= vocabulary:
            raise bad(f"Token id {token} is beyond the vocabulary of {vocabulary}.", "tokens")
    return token_ids(body.tokens)


def _truncation(body: EmbeddingBody | ClassifyBody) -> Truncation | None:
    if body.truncate_prompt_tokens is None:
        return None
    if body.truncate_prompt_tokens == 0:
        raise bad("truncate_prompt_tokens 0 would leave no input.", "truncate_prompt_tokens")
    # The beginning of a text says most about its topic, and embedding models are trained that way.
    return Truncation(body.truncate_prompt_tokens, body.truncation_side != "left")
