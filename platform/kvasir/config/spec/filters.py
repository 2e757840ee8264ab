"""The part of the deployment spec for output filters."""

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
    """Common settings of filters. Text is held until each filter has decided on it."""

    name: Name
    """Name of the filter in metrics."""
    models: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Names of models and LoRA adapters that the filter applies to. Unset: all."""
    tenants: tuple[Name, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Tenants that the filter applies to. Unset: all."""
    parts: tuple[OutputPartName, ...] = Field(default=("content", "reasoning", "tools"), min_length=1)
    """Parts of an answer that the filter applies to; `tools` are the arguments of tool calls as JSON text."""
    act: Literal["redact", "end"] = "end"
    """`redact` replaces each match with `replacement`. `end` ends the choice before the match with
    finish_reason `content_filter` and aborts the request on its worker."""
    replacement: str = Field(default="[redacted]", max_length=200)
    max_held_chars: int = Field(default=1024, ge=16, le=65_536)
    """Maximum characters held for a decision. Of a longer match, only the last this many characters are held
    back: set it to the length of the longest match that must not be sent."""
    max_held_s: float = Field(default=30.0, gt=0, le=600)
    """Maximum time that text is held for a decision."""
    at_bound: Literal["release", "end"] = "release"
    """What happens to text at these limits: it is released, or the choice ends before it."""


class RegexFilterSpec(FilterSpec):
    """A filter for regular expressions in Python syntax, limited to what can be matched in linear time: no
    back-references, lookaround, atomic groups or possessive repeats. `$` matches only at the end of the text.
    All matches count, including overlapping ones."""

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
    """A filter that calls a classifier over HTTP. Text is sent in overlapping windows and released when all
    windows that contain it have passed.

    With protocol `kvasir` the body is `{"text", "new_from", "final", "part", "model", "tenant"}`, where
    `new_from` is the number of characters that were sent before, and the answer is `{"flagged": bool,
    "spans": [[from, to], …]}`. The spans are redacted; without spans, the whole window is.
    """

    url: str = Field(max_length=2048)
    """URL to which windows are sent by POST. Redirects are not followed."""
    private_address: bool = False
    """Allow a URL that resolves to a private address, such as a service in the same cluster. Link-local
    addresses and metadata services are always refused."""
    protocol: Literal["kvasir", "moderations"] = "kvasir"
    """`moderations` is the protocol of OpenAI's /v1/moderations."""
    model: str | None = None
    """Value of `model` in requests to a moderations endpoint."""
    token_file: str | None = None
    """File with the token for `Authorization: Bearer`. It is read for each connection."""
    ca_file: str | None = None
    """PEM certificates of the authorities that certify the classifier. Unset: those of the system."""
    window_chars: int = Field(default=240, ge=16, le=32_768)
    """Characters collected per window."""
    overlap_chars: int = Field(default=80, ge=0, le=16_384)
    """Characters at the end of a window that are sent again with the next, to detect matches across
    windows."""
    window_s: float = Field(default=0.5, gt=0, le=60)
    """Maximum time to fill a window."""
    timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Timeout for one window, including retries."""
    retries: int = Field(default=1, ge=0, le=5)
    """Maximum retries after a lost connection or a status of 408, 429 or 5xx."""
    on_failure: Literal["closed", "open"] = "closed"
    """If a window cannot be classified, `closed` ends the choice as for a match, `open` releases the
    window."""
    max_connections: int = Field(default=16, ge=1, le=1024)
    """Maximum concurrent requests to the classifier. Other windows wait, within `timeout_s`."""
    at_bound: Literal["release", "end"] = "end"
    """What happens to text at these limits: it is released, or the choice ends before it."""
    max_held_chars: int = Field(default=4096, ge=16, le=65_536)
    """Maximum characters held for a decision."""

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
                f"({self.window_chars + self.overlap_chars}), which are held together"
            )
        return self


class OutputFiltersSpec(Spec):
    """Filters for the output of models. Each filter that applies sees the whole text, and a match of any of
    them is not sent. Default: none."""

    regex: tuple[RegexFilterSpec, ...] = Field(default=(), max_length=64)
    classifier: tuple[ClassifierFilterSpec, ...] = Field(default=(), max_length=16)

    @property
    def all(self) -> tuple[FilterSpec, ...]:
        """All filters."""
        return (*self.regex, *self.classifier)

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [each.name for each in self.all]
        if len(set(names)) != len(names):
            raise ValueError(f"filters: names must differ, found {names}; rename one")
        return self

    def unknown_name(self, models: Container[str], tenants: Container[str]) -> str | None:
        """Return an error text if a filter names an unknown model or tenant, else None."""
        for each in self.all:
            for field, names, known in (("models", each.models, models), ("tenants", each.tenants, tenants)):
                for name in names or ():
                    if name not in known:
                        return (
                            f"output_filters: {each.name} names unknown {name!r} in {field}; correct the "
                            "name or remove it"
                        )
        return None
