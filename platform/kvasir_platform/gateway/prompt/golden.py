"""The golden prompts as rendered and tokenized by the edge."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvasir.core.errors import RequestError
from kvasir.core.golden import GoldenPrompt, Message, Tool, golden_date, golden_prompts
from kvasir.native import chain_hashes, root_hash
from kvasir_platform.gateway.prompt.tokenization import Tokenizer


def edge_golden(model: str, tokenizer: Tokenizer) -> tuple[GoldenPrompt, ...]:
    """Return the golden prompts that every worker of `model` must reproduce."""

    def render(messages: Sequence[Message], tools: Sequence[Tool] | None) -> str | None:
        template = tokenizer.template
        if template is None:
            return None
        try:
            return template.render(messages, {"strftime_now": golden_date}, tools)
        except RequestError:
            return None

    def encode(text: str, add_special_tokens: bool) -> array[int]:
        return tokenizer.encode([text], add_special_tokens=add_special_tokens)[0]

    def chain(tokens: array[int], salt: str, adapter: str) -> int:
        return chain_hashes(tokens, 1, root_hash(model, salt, adapter))[-1]

    return golden_prompts(render, encode, chain)
