"""The base class and shared types of the deployment spec."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]


class Spec(BaseModel):
    """Base class of all parts of the spec: frozen, unknown fields are rejected, attributes are documented."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
