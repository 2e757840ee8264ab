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
from kvasir_platform.gateway.tokenization import ModelTokenizer, Tokenizer


def make_metrics(deployment: Deployment, registry: CollectorRegistry | None = None) -> Metrics:
    """The metrics of a deployment, in a registry of their own unless one is given."""
    names = [deployment.model.name, *(lora.name for lora in deployment.lora)]
    slos = [slo.name for slo in deployment.slo]
    return Metrics(CollectorRegistry() if registry is None else registry, names, slos)


def make_tokenizer(deployment: Deployment) -> ModelTokenizer:
    """The tokenizer and template of the deployment's model. Raises ConfigError when its files cannot be
    read."""
    return ModelTokenizer.from_folder(resolve_model(deployment.model.source, deployment.model.revision))


def make_gateway(
    deployment: Deployment,
    router: RouterPort,
    clock: Clock,
    metrics: Metrics | None = None,
    tokenizer: Tokenizer | None = None,
) -> Gateway:
    """A gateway in front of `router`. `clock` is the one that the router's readings are of. Raises
    ConfigError when the model's files or the key file cannot be read."""
    return Gateway(
        deployment,
        router,
        make_metrics(deployment) if metrics is None else metrics,
        make_tokenizer(deployment) if tokenizer is None else tokenizer,
        clock,
        spans=otlp_recorder(deployment.telemetry.otlp_endpoint, deployment.name),
    )
