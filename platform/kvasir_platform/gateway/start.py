"""What a composition root calls: a gateway with everything that the spec asks for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvasir.config.model_files import resolve_model
from kvasir.config.spec import Deployment
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import otlp_recorder
from kvasir_platform.gateway.app import Gateway
from kvasir_platform.gateway.tokenization import ModelTokenizer


def make_metrics(deployment: Deployment, registry: CollectorRegistry | None = None) -> Metrics:
    """The metrics of a deployment, in a registry of their own unless one is given."""
    names = [deployment.model.name, *(lora.name for lora in deployment.lora)]
    return Metrics(CollectorRegistry() if registry is None else registry, names)


def make_gateway(
    deployment: Deployment, router: RouterPort, clock: Clock, metrics: Metrics | None = None
) -> Gateway:
    """A gateway in front of `router`. `clock` is the one that the router's readings are of. Raises
    ConfigError when the model's files or the key file cannot be read."""
    folder = resolve_model(deployment.model.source, deployment.model.revision)
    return Gateway(
        deployment,
        router,
        make_metrics(deployment) if metrics is None else metrics,
        ModelTokenizer.from_folder(folder),
        clock,
        spans=otlp_recorder(deployment.telemetry.otlp_endpoint, deployment.name),
    )
