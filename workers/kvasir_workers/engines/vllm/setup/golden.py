"""The golden prompts as vLLM renders and tokenizes them, with transformers' templates.

Only the prompts are shared with the router's edge, so that agreement is meaningful. Imported only after
vLLM's environment is set.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import safe_apply_chat_template
from vllm.renderers.params import TokenizeParams

from kvasir.core.golden import GoldenPrompt, Message, Tool, golden_date, golden_prompts
from kvasir.core.requests import token_ids
from kvasir.native import chain_hashes, root_hash


def engine_golden(
    model: str, renderer: BaseRenderer, template: str | None = None
) -> tuple[GoldenPrompt, ...]:
    """Return the engine's results for the golden prompts under the served name `model`, with `template` in
    place of the model's; empty if it was started without a tokenizer. Takes milliseconds, and does not change
    the engine."""
    tokenizer = renderer.tokenizer
    if tokenizer is None:
        return ()
    # For some models without a template vLLM has a built-in one, which the edge does not have.
    has_template = template is not None or bool(getattr(tokenizer, "chat_template", None))

    def render(messages: Sequence[Message], tools: Sequence[Tool] | None) -> str | None:
        if not has_template:
            return None
        chat = [dict(message) for message in messages]
        try:
            return str(
                safe_apply_chat_template(
                    renderer.model_config,
                    tokenizer,
                    chat,
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    strftime_now=golden_date,
                )
            )
        except Exception:  # noqa: BLE001 - a template is the model's code: it does not support this chat
            return None

    def encode(text: str, add_special_tokens: bool) -> array[int]:
        # Without a limit: a golden prompt is never run, so it may exceed the model's context.
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=add_special_tokens)
        return token_ids(renderer.tokenize_prompt({"prompt": text}, params)["prompt_token_ids"])

    def chain(tokens: array[int], salt: str, adapter: str) -> int:
        return chain_hashes(tokens, 1, root_hash(model, salt, adapter))[-1]

    return golden_prompts(render, encode, chain)
