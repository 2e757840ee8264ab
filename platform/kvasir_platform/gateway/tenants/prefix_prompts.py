"""The prompts from which the tokens of declared prefixes are taken, for each model of a gateway."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from kvasir.config.spec.deployment import Deployment
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.tenants.shared_prefixes import SharedPrefixes, Tokenize

_TURNS = ("Hello there", "1. \n?")
"""First turns that begin with different characters, so that no common token follows the system prompt."""


def shared_prefixes(deployment: Deployment, models: ModelTable) -> SharedPrefixes | None:
    """Return the declared prefixes, None if there are none. Renders and tokenizes each of them."""
    specs = deployment.tenancy.shared_prefixes
    return SharedPrefixes(specs, {model.name: _ways(model) for model in models.models}) if specs else None


def _ways(model: EdgeModel) -> Sequence[Tokenize]:
    if model.tokenizer.template is None:
        return ()
    return tuple(partial(_chats, model, role) for role in ("system", "developer"))


def _chats(model: EdgeModel, role: str, text: str) -> Sequence[array[int]]:
    """Return the tokens of chats with this system prompt, as `chat_call` and the tokenizer make them."""
    template = model.tokenizer.template
    if template is None:
        return (array("I"),)
    control = model.control_in_chats
    prompts = []
    for turn in _TURNS:
        messages = [{"role": role, "content": text}, {"role": "user", "content": turn}]
        prompts.append(
            template.render(messages, {})
            if control is None
            else control.rendered(messages, (), lambda shown, _: template.render(shown, {}))
        )
    return model.tokenizer.encode(prompts, add_special_tokens=False)
