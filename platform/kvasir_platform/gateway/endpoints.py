"""What a gateway serves, built from a deployment and its router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.config.spec.deployment import Deployment
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.responses import ResponseStore
from kvasir.ports.router import RequestPort, RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.batches.service import BatchService
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.console.site_files import ConsoleSite
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.filters.build import OutputFilters
from kvasir_platform.gateway.media.fetch import MediaFetches, fetched_kinds
from kvasir_platform.gateway.operator.about_page import AboutPages
from kvasir_platform.gateway.operator.operators import OperatorPages, operators_here, remote_operators
from kvasir_platform.gateway.operator.pages import Pages
from kvasir_platform.gateway.responses.memory_store import MemoryResponses
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.embedding_api import EmbeddingApi
from kvasir_platform.gateway.serving.error_answers import ErrorAnswers
from kvasir_platform.gateway.serving.generate_api import GenerateApi
from kvasir_platform.gateway.serving.messages_api import MessagesApi
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.serving.responses_api import ResponsesApi
from kvasir_platform.gateway.serving.tokenize_api import TextApi
from kvasir_platform.gateway.tenants.callers import Callers
from kvasir_platform.gateway.tenants.prefix_prompts import shared_prefixes
from kvasir_platform.gateway.traffic.choice import Shares
from kvasir_platform.gateway.traffic.rollouts import Rollouts
from kvasir_platform.gateway.traffic.setup import counted, traffic_parts


@dataclass(frozen=True, slots=True)
class RoutedCore:
    """What endpoints use of the router, in this process or another. `shares` returns the share of each
    canary, `operate` has the operators' pages, `stored` the responses that are kept."""

    requests: RequestPort
    shares: Shares
    operate: OperatorPages
    stored: ResponseStore


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints of one gateway, by what they are about."""

    generate: GenerateApi
    responses: ResponsesApi
    messages: MessagesApi
    embeddings: EmbeddingApi
    texts: TextApi
    batches: BatchService
    operate: OperatorPages
    pages: Pages
    about: AboutPages
    console: ConsoleSite

    def in_flight(self) -> int:
        """Return the number of calls in the router."""
        return self.generate.in_flight() + self.embeddings.in_flight()


def routed_core(
    deployment: Deployment,
    router: RouterPort | RemoteCore,
    models: ModelTable,
    metrics: Metrics,
    clock: Clock,
    *,
    in_flight: Callable[[], int],
    draining: Callable[[], bool],
    rollouts: Rollouts | None,
    costs: CostKeeper | None,
) -> RoutedCore:
    """Return what endpoints use of `router`. `in_flight` returns the number of calls in it."""
    if isinstance(router, RemoteCore):
        return RoutedCore(router.router, router.shares, remote_operators(router), router.responses)
    operate = operators_here(
        deployment,
        models,
        router,
        metrics,
        clock,
        in_flight=in_flight,
        draining=draining,
        rollouts=rollouts,
        costs=costs,
    )
    return RoutedCore(
        *counted(router, rollouts), operate, MemoryResponses(deployment.gateway.responses, clock.now)
    )


def gateway_context(
    deployment: Deployment,
    core: RoutedCore,
    models: ModelTable,
    metrics: Metrics,
    clock: Clock,
    *,
    filters: OutputFilters,
    spans: SpanRecorder | None,
    wall: Callable[[], float],
    suffix: Callable[[], str],
) -> GatewayContext:
    """Return what the endpoints share; see GatewayContext."""
    return GatewayContext(
        deployment,
        core.requests,
        core.operate.names,
        models,
        ErrorAnswers(metrics),
        metrics,
        filters,
        spans,
        clock,
        wall,
        suffix,
        shared_prefixes(deployment, models),
        traffic_parts(deployment, models, core.requests, core.shares, suffix, metrics=metrics, clock=clock),
        MediaFetches(deployment.gateway, now=clock.now) if fetched_kinds(deployment.gateway) else None,
    )


def endpoints(
    context: GatewayContext, core: RoutedCore, callers: Callers, *, new_id: Callable[[], str], rng: Rng
) -> Endpoints:
    """Return the endpoints. `new_id` returns request ids. Raise ConfigError for a storage of batches that
    cannot be used."""
    spec, models = context.deployment.gateway, context.models
    generate, embeddings = GenerateApi(context), EmbeddingApi(context)
    responses = ResponsesApi(context, generate, core.stored)
    return Endpoints(
        generate=generate,
        responses=responses,
        messages=MessagesApi(context, generate),
        embeddings=embeddings,
        texts=TextApi(context),
        batches=BatchService(
            spec,
            callers,
            (generate.chat, generate.completion, embeddings.embed, responses.create),
            answer=context.errors.answer,
            new_id=new_id,
            clock=context.clock,
            wall=context.wall,
            rng=rng,
        ),
        operate=core.operate,
        pages=Pages(models, core.requests, created=int(context.wall())),
        about=AboutPages(models, keyed=spec.authenticates, secure=spec.tls.cert_file is not None),
        console=ConsoleSite(),
    )
