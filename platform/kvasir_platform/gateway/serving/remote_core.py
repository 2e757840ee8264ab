"""A router in another process, as a gateway needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.ports.limits import RateLimits
from kvasir.ports.router import RequestPort
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.serving.request_names import RequestNames


@dataclass(frozen=True, slots=True)
class RemoteCore:
    """What is done there for this gateway and for others: requests, the counting of rate limits, and the
    memory of calls. `cache_secret` is what the salts of caches are made from; `show` answers what is asked of
    the whole deployment, or raises KvasirError."""

    router: RequestPort
    limits: RateLimits
    names: RequestNames
    cache_secret: bytes
    show: Callable[[Exchange], None]
