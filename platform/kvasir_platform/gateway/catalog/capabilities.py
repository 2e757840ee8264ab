"""What a model of the deployment supports, so that the edge refuses unsupported requests by field.

A worker would refuse them too, but later and as a failure; the error of the edge names the field at fault and
the line of the spec that would allow it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.checkpoint.media.rules import MediaRules
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.media.served import MediaInputs
from kvasir.core.errors import RequestError
from kvasir.core.requests import Role


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """What a model does: it generates, or its pools of role embed make embeddings or compute classes. `tools`
    and `reasoning`: whether the workers have the model's parsers for them. `client_templates`: whether
    clients may bring chat templates of their own. `media` is None for a model of text only."""

    generates: bool = True
    embeds: bool = False
    classifies: bool = False
    tools: bool = False
    reasoning: bool = False
    client_templates: bool = False
    media: MediaInputs | None = None


TEXT_ONLY = ModelCapabilities()
"""Text as it comes."""


def model_capabilities(
    deployment: Deployment, *, classifies: bool = False, rules: MediaRules | None = None
) -> ModelCapabilities:
    """Return the capabilities of a single-model `deployment`: those that all of its pools for that work
    share. `classifies`: the model computes classes in the place of embeddings. `rules` are
    what it makes of media, None if it takes text only."""
    speaking = [pool.engine for pool in deployment.pools if pool.role in (Role.DECODE, Role.BOTH)]
    return ModelCapabilities(
        generates=bool(speaking),
        embeds=not classifies and deployment.embeds,
        classifies=classifies,
        tools=bool(speaking) and all(engine.tool_parser is not None for engine in speaking),
        reasoning=bool(speaking) and all(engine.reasoning_parser is not None for engine in speaking),
        client_templates=deployment.api.trust_chat_templates,
        media=None if rules is None or not rules.placeholders else MediaInputs(rules, deployment.gateway),
    )


def check_generates(capabilities: ModelCapabilities, model: str) -> None:
    """Raise RequestError if `model` does not generate text."""
    if capabilities.classifies:
        raise _classifies_only(model)
    if not capabilities.generates:
        raise _wrong_task(f"The model {model!r} makes embeddings only; use /v1/embeddings.")


def check_embeds(capabilities: ModelCapabilities, model: str) -> None:
    """Raise RequestError if `model` does not embed."""
    if capabilities.classifies:
        raise _classifies_only(model)
    if not capabilities.embeds:
        raise _wrong_task(
            f"The model {model!r} makes no embeddings: that takes a pool of role embed in the deployment."
        )


def check_classifies(capabilities: ModelCapabilities, model: str) -> None:
    """Raise RequestError if `model` does not classify."""
    if not capabilities.classifies:
        raise _wrong_task(
            f"The model {model!r} computes no classes: that takes a model for sequence classification in a "
            "pool of role embed."
        )


def _classifies_only(model: str) -> RequestError:
    return _wrong_task(
        f"The model {model!r} computes classes only; use /v1/classify or, for a score of two texts, "
        "/v1/rerank or /v1/score."
    )


def _wrong_task(message: str) -> RequestError:
    return RequestError(message, code="unsupported_task", param="model")
