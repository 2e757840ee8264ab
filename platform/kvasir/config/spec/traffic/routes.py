"""The part of the deployment spec for routes: names that clients send as `model`, and which model answers.

A route decides before the request is tokenized, because models differ in their tokenizers. Names of routes
form a graph, which must end at models: an alias of an alias is allowed, a cycle is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Name, Spec
from kvasir.config.spec.models import ModelName
from kvasir.config.spec.routing import PolicyName

_AFFINITY = re.compile(r"session|tenant|none|header:[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_HEADER = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SECRET_HEADERS = frozenset(("authorization", "x-api-key", "cookie", "proxy-authorization"))

HeaderText = Annotated[str, Field(max_length=256)]


class RouteArmSpec(Spec):
    """One arm of a weighted split."""

    model: str
    """A model or LoRA adapter of the spec."""
    weight: float = Field(default=1.0, ge=0, le=1_000_000)
    """Weight of the arm's share of requests. 0: none, until the weight is changed."""


class CanarySpec(Spec):
    """A second model that takes a growing share of the route's requests, once `kvasir rollout start` begins
    it. It is compared with the route's own model, and a rollout ends by itself in promotion or rollback."""

    model: str
    """The model or LoRA adapter that is tried."""
    steps: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=(0.05, 0.25, 0.5), min_length=1, max_length=16
    )
    """Shares of requests that the canary gets, one after the other. After the last one it gets all."""
    step_s: float = Field(default=300.0, ge=0, le=7 * 86_400)
    """Minimum duration of a step."""
    min_requests: int = Field(default=200, ge=20, le=1_000_000)
    """Minimum requests of the canary that are compared in a step."""
    timeout_s: float = Field(default=86_400.0, gt=0, le=30 * 86_400)
    """A step that has not ended after this time, for want of requests or of a clear difference, pauses the
    rollout."""
    max_slowdown: float = Field(default=1.1, ge=1, le=10)
    """TTFT and mean ITL may exceed those of the route's model by this factor."""
    false_rollback: float = Field(default=0.05, gt=0, le=0.5)
    """Maximum probability that a rollout of an equal model is rolled back, over its whole duration."""

    @field_validator("steps")
    @classmethod
    def _growing(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError("steps: each must be larger than the one before, as in [0.05, 0.25, 0.5]")
        return steps


class ShadowSpec(Spec):
    """Copies of requests to another model, whose answers are compared and never returned. They are not
    counted for the tenant, run in the least urgent priority class, and are dropped first under load."""

    model: str
    share: float = Field(default=0.05, gt=0, le=1)
    """Fraction of requests that are copied."""
    max_concurrency: int = Field(default=4, ge=1, le=1024)
    """Maximum copies that run at the same time, in each process that serves HTTP."""
    max_body_bytes: int = Field(default=64 << 10, ge=256, le=8 << 20)
    """Requests with a larger body are not copied."""
    max_tokens: int = Field(default=256, ge=1, le=65_536)
    """Maximum output of a copy."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """A copy that takes longer is cancelled."""


class RouteRuleSpec(Spec):
    """What is different for requests that match all of the conditions. The first rule that matches
    applies."""

    tenants: tuple[Name, ...] = Field(default=(), max_length=1000)
    """Tenants whose requests match. Empty: all."""
    headers: Mapping[str, HeaderText] = Field(default_factory=dict, max_length=8)
    """Headers that the request must have, in lower case, with their exact values."""
    min_prompt_chars: int | None = Field(default=None, ge=0)
    """Minimum characters of the prompt's text, before the chat template."""
    max_prompt_chars: int | None = Field(default=None, ge=0)
    """Maximum characters of the prompt's text."""
    model: str | None = None
    """Model or LoRA adapter that answers instead of the route's arms."""
    slo: Name | None = None
    """SLO class of the requests, whatever their header names."""
    policy: PolicyName | None = None
    """Routing policy that places the requests on workers."""

    @field_validator("headers")
    @classmethod
    def _plain_names(cls, headers: Mapping[str, str]) -> Mapping[str, str]:
        for name in headers:
            if _HEADER.fullmatch(name) is None:
                raise ValueError(f"headers: {name!r} is no header name in lower case, as in x-plan")
            if name in _SECRET_HEADERS:
                raise ValueError(f"headers: {name} has a secret; match on tenants instead")
        return headers

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.model is None and self.slo is None and self.policy is None:
            raise ValueError("rules: a rule sets nothing; set model, slo or policy")
        low, high = self.min_prompt_chars, self.max_prompt_chars
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"rules: min_prompt_chars {low} exceeds max_prompt_chars {high}; no request matches"
            )
        return self

    @property
    def measures_prompts(self) -> bool:
        """Whether the length of the prompt matters."""
        return self.min_prompt_chars is not None or self.max_prompt_chars is not None


class RouteSpec(Spec):
    """A name that clients can send as `model`. The answer names the model that gave it."""

    name: ModelName
    model: str | None = None
    """The model, LoRA adapter or other route that answers: an alias. Either this or `arms`."""
    arms: tuple[RouteArmSpec, ...] = Field(default=(), max_length=16)
    """A weighted split over several models."""
    affinity: str = "session"
    """Requests with the same key go to the same arm: `session` (x-session-id, or session_id, prompt_cache_key
    or user of the body), `tenant`, `header:NAME`, or `none`. A request without a key is assigned by its
    id."""
    canary: CanarySpec | None = None
    fallbacks: tuple[str, ...] = Field(default=(), max_length=8)
    """Models, LoRA adapters or routes that answer in this order if no worker serves the model, or if it has
    no capacity or fails before the first token."""
    rules: tuple[RouteRuleSpec, ...] = Field(default=(), max_length=64)
    shadow: ShadowSpec | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.model is None) == (not self.arms):
            raise ValueError(f"routes: {self.name} needs either model or arms, and not both")
        names = [arm.model for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"routes: {self.name} lists an arm twice; add up its weights")
        if self.arms and not sum(arm.weight for arm in self.arms):
            raise ValueError(f"routes: the weights of {self.name} are all 0; set one above 0")
        if self.canary is not None and self.model is None:
            raise ValueError(f"routes: {self.name} has a canary, so it needs model and not arms")
        if _AFFINITY.fullmatch(self.affinity) is None:
            raise ValueError(
                f"routes: affinity {self.affinity!r} of {self.name} is none of session, tenant, none, "
                "header:NAME"
            )
        if self.affinity.removeprefix("header:") in _SECRET_HEADERS:
            raise ValueError(f"routes: affinity of {self.name}: the header has a secret; use tenant")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """The names that answer ordinary requests, without fallbacks, rules, canary and shadow."""
        return tuple(arm.model for arm in self.arms) if self.model is None else (self.model,)

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield each field that takes models only, with its value."""
        yield from (("arms", arm.model) for arm in self.arms)
        yield from (("rules", rule.model) for rule in self.rules if rule.model is not None)
        if self.canary is not None:
            yield "canary", self.canary.model
        if self.shadow is not None:
            yield "shadow", self.shadow.model
