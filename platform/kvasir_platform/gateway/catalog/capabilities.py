"""What a model of the deployment can do, so that what it cannot is refused at the edge, by name.

A worker would refuse too, but later and for every client alike as a failure; here the answer says which field
asks for too much, and which line of the spec would allow it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import RequestError
from kvasir.core.requests import Role


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """`tools` and `reasoning`: whether the workers have the model's parsers for them. `client_templates`:
    whether clients may bring chat templates of their own."""

    generates: bool = True
    embeds: bool = False
    tools: bool = False
    reasoning: bool = False
    client_templates: bool = False


TEXT_ONLY = ModelCapabilities()
"""Text as it comes."""


def model_capabilities(deployment: Deployment) -> ModelCapabilities:
    """What the model of a single-model `deployment` can do: what all of its pools can that do that work."""
    speaking = [pool.engine for pool in deployment.pools if pool.role in (Role.DECODE, Role.BOTH)]
    return ModelCapabilities(
        generates=bool(speaking),
        embeds=any(pool.role is Role.EMBED for pool in deployment.pools),
        tools=bool(speaking) and all(engine.tool_parser is not None for engine in speaking),
        reasoning=bool(speaking) and all(engine.reasoning_parser is not None for engine in speaking),
        client_templates=deployment.api.trust_chat_templates,
    )


def check_generates(capabilities: ModelCapabilities, model: str) -> None:
    """Raise RequestError where `model` generates no text."""
    if not capabilities.generates:
        raise _wrong_task(f"The model {model!r} makes embeddings only; use /v1/embeddings.")


def check_embeds(capabilities: ModelCapabilities, model: str) -> None:
    """Raise RequestError where `model` makes no embeddings."""
    if not capabilities.embeds:
        raise _wrong_task(
            f"The model {model!r} makes no embeddings: that takes a pool of role embed in the deployment."
        )


def _wrong_task(message: str) -> RequestError:
    return RequestError(message, code="unsupported_task", param="model")
