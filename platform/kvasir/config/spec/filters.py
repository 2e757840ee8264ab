"""The deployment spec's part about output filters: what clients may not see, and what is done about it."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.checks.outbound import OutboundRefused, check_target, parse_url
from kvasir.config.checks.patterns import PatternError, build_graph
from kvasir.config.spec.base import Name, Spec

OutputPartName = Literal["content", "reasoning", "tools"]
_MODEL = re.compile(r"[\x21-\x7e]{1,256}")


class FilterSpec(Spec):
    """What all filters have. Text is held back while a filter has not ruled on it."""

    name: Name
    """As metrics show it."""
    models: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Names of models and LoRA adapters that it applies to. Unset: all."""
    tenants: tuple[Name, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Tenants that it applies to. Unset: all."""
    parts: tuple[OutputPartName, ...] = Field(default=("content", "reasoning", "tools"), min_length=1)
    """What of an answer it judges; `tools` are the arguments of tool calls, as JSON text."""
    act: Literal["redact", "end"] = "end"
    """`redact` puts the replacement in the place of what was found; `end` ends the choice before it, with
    finish_reason `content_filter`, and takes the request off its worker."""
    replacement: str = Field(default="[redacted]", max_length=200)
    max_held_chars: int = Field(default=1024, ge=16, le=65_536)
    """Text that may wait for a ruling. What is found never has more than its last so many characters kept
    back: choose it as long as the longest match that must not get out."""
    max_held_s: float = Field(default=30.0, gt=0, le=600)
    """How long text may wait for a ruling."""
    at_bound: Literal["release", "end"] = "release"
    """When text would have to wait for longer: it is let through, or the choice ends there."""


class RegexFilterSpec(FilterSpec):
    """Looks for regular expressions, in Python's syntax as far as it can be followed in linear time: without
    back-references, lookaround, atomic groups and possessive repeats. `$` is the end of the text only. All
    matches count, also those that overlap."""

    patterns: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    ignore_case: bool = False

    @field_validator("patterns")
    @classmethod
    def _followable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            build_graph(value)
        except PatternError as error:
            raise ValueError(str(error)) from error
        return value


class ClassifierFilterSpec(FilterSpec):
    """Asks a classifier over HTTP. Text is sent in windows that overlap, and goes out when the windows that
    it lies in have passed.

    With protocol `kvasir` the body is `{"text", "new_from", "final", "part", "model", "tenant"}`, where
    `new_from` is how many characters were sent before, and the answer is `{"flagged": bool, "spans":
    [[from, to], …]}`. The spans are those to redact; without them the whole window is.
    """

    url: str = Field(max_length=2048)
    """Where windows are sent by POST. Redirects are not followed."""
    private_address: bool = False
    """Whether the URL may lead to an address that is not public, as that of a service in the same cluster.
    Links and metadata services stay refused."""
    protocol: Literal["kvasir", "moderations"] = "kvasir"
    """`moderations` is that of OpenAI's /v1/moderations."""
    model: str | None = None
    """What a moderations endpoint is asked for as its `model`."""
    token_file: str | None = None
    """File with a token that is sent as `Authorization: Bearer`. It is read for each new connection."""
    ca_file: str | None = None
    """PEM certificates of the authorities that may certify the classifier. Unset: those of the system."""
    window_chars: int = Field(default=240, ge=16, le=32_768)
    """Text that is collected before it is sent."""
    overlap_chars: int = Field(default=80, ge=0, le=16_384)
    """How much of a window is sent again with the next, so that what lies across their border is seen."""
    window_s: float = Field(default=0.5, gt=0, le=60)
    """How long a window waits to be filled."""
    timeout_s: float = Field(default=2.0, gt=0, le=60)
    """For one window, all tries together."""
    retries: int = Field(default=1, ge=0, le=5)
    """Further tries after a lost connection or a status of 408, 429 or 5xx."""
    on_failure: Literal["closed", "open"] = "closed"
    """When a window could not be judged: `closed` ends the choice as if something had been found, `open` lets
    it through."""
    max_connections: int = Field(default=16, ge=1, le=1024)
    """Windows that are judged at the same time; others wait for their turn, within `timeout_s`."""
    at_bound: Literal["release", "end"] = "end"
    """When text would have to wait for longer: it is let through, or the choice ends there."""
    max_held_chars: int = Field(default=4096, ge=16, le=65_536)
    """Text that may wait for a ruling."""

    @field_validator("model")
    @classmethod
    def _sendable(cls, value: str | None) -> str | None:
        if value is not None and not _MODEL.fullmatch(value):
            raise ValueError("a name of printable ASCII characters without spaces")
        return value

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        try:
            check_target(parse_url(self.url), private=self.private_address)
        except OutboundRefused as error:
            hint = "" if self.private_address else "; for a service of your own set private_address: true"
            raise ValueError(f"url: {error}{hint}") from error
        if self.overlap_chars + self.window_chars > self.max_held_chars:
            raise ValueError(
                "max_held_chars must be at least window_chars + overlap_chars "
                f"({self.window_chars + self.overlap_chars}), which wait together"
            )
        return self


class OutputFiltersSpec(Spec):
    """What of the models' output clients may see. All filters that apply judge the same text, and what any of
    them finds is not let through. By default there are none."""

    regex: tuple[RegexFilterSpec, ...] = Field(default=(), max_length=64)
    classifier: tuple[ClassifierFilterSpec, ...] = Field(default=(), max_length=16)

    @property
    def all(self) -> tuple[FilterSpec, ...]:
        """Every filter."""
        return (*self.regex, *self.classifier)

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [each.name for each in self.all]
        if len(set(names)) != len(names):
            raise ValueError(f"filters: names must differ, found {names}; rename one")
        return self

    def unknown_name(self, models: Container[str], tenants: Container[str]) -> str | None:
        """What is wrong where a filter is for a model or a tenant that does not exist."""
        for each in self.all:
            for field, names, known in (("models", each.models, models), ("tenants", each.tenants, tenants)):
                for name in names or ():
                    if name not in known:
                        return (
                            f"output_filters: {each.name} names {name!r} in {field}, which is not there; "
                            "correct the name or remove it"
                        )
        return None
