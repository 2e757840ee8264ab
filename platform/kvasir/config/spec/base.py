"""What every part of the deployment spec is made of."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]


class Spec(BaseModel):
    """A part of the spec: frozen, without unknown fields, its attributes documented."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def is_loopback(host: str) -> bool:
    """Whether what binds to `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
