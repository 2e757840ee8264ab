"""Builds a gateway from the deployment spec, for composition roots."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvasir.checkpoint.media.rules import media_rules
from kvasir.checkpoint.sampling_defaults import NEUTRAL, sampling_defaults
from kvasir.config.load.model_files import configured_template, matryoshka, resolve_model
from kvasir.config.load.model_parsers import resolved
from kvasir.config.load.model_support import served_classes
from kvasir.config.spec.deployment import Deployment
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.limits import RateLimits
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.renamed import AliasingRegistry
from kvasir.telemetry.spans import SpanRecorder, otlp_recorder
from kvasir_platform.gateway.app import Gateway
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable
from kvasir_platform.gateway.costs.budgets import within_budgets
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.filters.build import output_filters
from kvasir_platform.gateway.prompt.fast_tokenizer import return_memory
from kvasir_platform.gateway.prompt.pairs import classifier_of
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer, TokenizerPool
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.tenants.callers import LimitsOver, make_callers, make_limits, unchanged
from kvasir_platform.gateway.tenants.salts import salt_secret
from kvasir_platform.gateway.traffic.rollouts import Rollouts


def make_metrics(deployment: Deployment, registry: CollectorRegistry | None = None) -> Metrics:
    """Return the metrics of a deployment, in a new registry unless one is given."""
    slos = [slo.name for slo in deployment.slo]
    return Metrics(AliasingRegistry() if registry is None else registry, deployment.served_names(), slos)


def make_models(deployment: Deployment) -> ModelTable:
    """Load the tokenizers and metadata of the deployment's models. Models of one folder and chat template
    share a tokenizer. Raise ConfigError if the files of a model cannot be read."""
    pools: dict[tuple[Path, str | None], TokenizerPool] = {}
    models = []
    for view in deployment.views():
        folder = resolve_model(view.model.source, view.model.revision)
        template = configured_template(view.model.chat_template)
        pool = pools.get((folder, template))
        if pool is None:
            pool = TokenizerPool(ModelTokenizer.from_folder(folder, deployment.tokenizer, template))
            pools[folder, template] = pool
        dimensions = matryoshka(folder, view.model.matryoshka)
        defaults = sampling_defaults(folder) if view.model.generation_config == "auto" else NEUTRAL
        served = resolved(view, folder)
        classes = served_classes(view, folder)
        classifier = None if classes is None else classifier_of(classes, folder, template)
        media = media_rules(folder)
        models.append(EdgeModel.of(served, pool, dimensions, defaults, classifier, media=media))
    return_memory()
    return ModelTable(models)


def make_budgeted_limits(
    deployment: Deployment, clock: Clock, rng: Rng, costs: CostKeeper | None, over: LimitsOver = unchanged
) -> RateLimits:
    """Return the rate limits of the spec, which also keep the budgets of `costs`."""
    limits = over(make_limits(deployment.tenancy.redis, clock, rng))
    return within_budgets(limits, None if costs is None else costs.budgets)


def make_gateway(
    deployment: Deployment,
    router: RouterPort | RemoteCore,
    clock: Clock,
    metrics: Metrics | None = None,
    models: ModelTable | None = None,
    *,
    spans: SpanRecorder | None = None,
    rollouts: Rollouts | None = None,
    costs: CostKeeper | None = None,
    limits_over: LimitsOver = unchanged,
) -> Gateway:
    """Return a gateway in front of `router`. `rollouts` are those of the spec's canaries, and `limits_over`
    makes limits of all cells of those of this one. `clock` is the
    clock of the router's timestamps. Raise ConfigError if files of models, API keys or filters cannot be
    read."""
    metrics = make_metrics(deployment) if metrics is None else metrics
    rng = random.SystemRandom()
    far = router if isinstance(router, RemoteCore) else None
    return Gateway(
        deployment,
        router,
        metrics,
        make_models(deployment) if models is None else models,
        clock,
        callers=make_callers(
            deployment,
            clock,
            time.time,
            rng,
            os.environ,
            secret=salt_secret(deployment) if far is None else far.cache_secret,
            limits=far.limits
            if far is not None
            else make_budgeted_limits(deployment, clock, rng, costs, limits_over),
        ),
        rollouts=rollouts,
        filters=output_filters(deployment.output_filters, metrics, now=clock.now, rng=rng),
        costs=costs,
        spans=_spans(deployment) if spans is None else spans,
    )


def _spans(deployment: Deployment) -> SpanRecorder | None:
    spec = deployment.telemetry
    return otlp_recorder(
        spec.otlp_endpoint, deployment.name, share=spec.trace_share, most_per_s=spec.traces_per_s
    )
