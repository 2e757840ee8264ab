"""The dependencies that all API endpoints share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.config.spec.deployment import Deployment
from kvasir.ports.clock import Clock
from kvasir.ports.router import BrownoutView, RequestPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.filters.build import OutputFilters
from kvasir_platform.gateway.media.fetch import MediaFetches
from kvasir_platform.gateway.serving.error_answers import ErrorAnswers
from kvasir_platform.gateway.serving.request_names import RequestNames
from kvasir_platform.gateway.tenants.shared_prefixes import SharedPrefixes
from kvasir_platform.gateway.traffic.setup import TrafficParts


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """Dependencies of the endpoints. `names` records each call that reaches the router; `wall` returns Unix
    time in seconds; `suffix` returns a short random string; `prefixes` are those that tenants share, if any.
    `traffic` is None if the spec has no routes, and `media_fetches` if it allows no URLs of media."""

    deployment: Deployment
    router: RequestPort
    names: RequestNames
    models: ModelTable
    errors: ErrorAnswers
    metrics: Metrics
    filters: OutputFilters
    spans: SpanRecorder | None
    clock: Clock
    wall: Callable[[], float]
    suffix: Callable[[], str]
    prefixes: SharedPrefixes | None = None
    traffic: TrafficParts | None = None
    media_fetches: MediaFetches | None = None


def brownout_line(brownout: BrownoutView) -> bytes:
    """Return the header line that describes the active brown-out steps, empty if there are none."""
    return b"x-kvasir-brownout: %b\r\n" % brownout.text.encode() if brownout.level else b""
