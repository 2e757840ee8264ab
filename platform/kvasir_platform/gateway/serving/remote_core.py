"""The interface of a gateway to a router in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvasir.ports.limits import RateLimits
from kvasir.ports.responses import ResponseStore
from kvasir.ports.router import RequestPort
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.serving.request_names import RequestNames


@dataclass(frozen=True, slots=True)
class RemoteCore:
    """Services of the core, shared by all gateways: requests, rate limits, stored responses, the record of
    calls. Cache salts are derived from `cache_secret`; `show` serves the operator pages of the whole
    deployment, or raises KvasirError; `shares` returns the share of each canary."""

    router: RequestPort
    limits: RateLimits
    responses: ResponseStore
    names: RequestNames
    cache_secret: bytes
    show: Callable[[Exchange], None]
    shares: Callable[[], Mapping[str, float]] = dict
