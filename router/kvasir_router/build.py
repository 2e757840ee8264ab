"""Builds a router from the deployment spec; the caller chooses its adapters."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.routing import strictest
from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import WorkerIdentity
from kvasir.core.locality import KNOWN_LINKS, LinkClass
from kvasir.core.membership import Endpoint
from kvasir.core.requests import Request
from kvasir.core.session_link import LinkLimits
from kvasir.native.salt_places import prompt_names
from kvasir.performance.profile import CalibratedProfile
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.discovery import Discovery
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir.ports.session import Dialer
from kvasir_router.adapters.control import AdapterControl
from kvasir_router.admission.from_spec import rules_of
from kvasir_router.decide import CostRates, NamedPolicies, RateBook, WorkerPriors, make_policy, rates_of
from kvasir_router.decide.links import LinkSetting, link_rates_of
from kvasir_router.embeddings.fleet import BatchLimits, EmbeddingFleet
from kvasir_router.embeddings.machine import EmbeddingMachine
from kvasir_router.fast_path import FastPath
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.fleet.registry import Registry
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.index import FleetIndex, IndexMode
from kvasir_router.mux import RouterMux
from kvasir_router.recordings.recorder import Recordings
from kvasir_router.requests.machine import MachineLimits, RequestMachine
from kvasir_router.sessions.inactivity import SessionPatience
from kvasir_router.sessions.members import MakeSession
from kvasir_router.sessions.session import SessionEvent, SessionLimits, WorkerSession
from kvasir_router.sessions.shared_discovery import SharedDiscovery
from kvasir_router.shell import Router, unobserved

log = logging.getLogger(__name__)

HURRIED_HEARTBEATS = 1.6
"""Heartbeats without a message after which a worker counts as silent, once another one has fallen silent."""


def hash_blocks(request: Request, block_size: int) -> array[int]:
    """The hashes of the prompt's whole blocks: see `prompt_names`."""
    adapter, media = request.adapter or "", request.media
    return prompt_names(request.model, request.salt, adapter, request.tokens, block_size, media=media)


def make_machine(
    deployment: Deployment,
    rng: Rng,
    *,
    priors: Callable[[WorkerIdentity], CostRates] = rates_of,
    decisions: DecisionLog | None = None,
    on_gap: Callable[[str | None], None] = unobserved,
) -> RequestMachine:
    """The decisions alone, as production, simulation and replay run them. `on_gap` is called with the role
    that is missing when requests begin to run on workers of other roles, and with None when that ends."""
    routing, redis = deployment.routing, deployment.tiers.redis
    fleet = Fleet(
        make_policy(routing.policy, deployment.disaggregation, rng),
        FleetIndex(
            capacity_blocks=routing.index_blocks,
            predicted_blocks=routing.predicted_blocks,
            predicted_ttl_s=routing.predicted_ttl_s,
            shared_keep_s=0.0 if redis is None else redis.ttl_s,
        ),
        RateBook(priors, partial(link_rates_of, settings=_link_settings(deployment))),
        hash_blocks=hash_blocks,
        expected_output_tokens=deployment.gateway.default_max_tokens,
        index_modes={pool.name: IndexMode(pool.kv_index) for pool in deployment.pools},
        policies=NamedPolicies(deployment.disaggregation, rng),
        decisions=decisions,
        health=routing.health,
        gap=RoleGap(routing.cross_role_after_s, on_gap),
    )
    return RequestMachine(fleet, _limits_of(deployment), rules_of(deployment))


def _log_gap(model: str, missing: str | None) -> None:
    if missing is None:
        log.warning("requests of %s run on workers of their roles again", model)
    else:
        log.warning("%s: requests of %s run whole on workers of any role", missing, model)


def _link_settings(deployment: Deployment) -> dict[LinkClass, LinkSetting]:
    links = deployment.transfer.links
    specs = {link: getattr(links, link.label) for link in KNOWN_LINKS}
    return {link: LinkSetting(spec.bytes_per_s, spec.latency_s) for link, spec in specs.items()}


def make_embedding_machine(deployment: Deployment, rng: Rng) -> EmbeddingMachine:
    """The decisions of an embedding model."""
    batches = {
        pool.name: BatchLimits(pool.engine.max_num_seqs, pool.engine.max_num_batched_tokens)
        for pool in deployment.pools
    }
    fleet = EmbeddingFleet(batches, rng, deployment.routing.health)
    return EmbeddingMachine(fleet, _limits_of(deployment), rules_of(deployment))


def _limits_of(deployment: Deployment) -> MachineLimits:
    routing = deployment.routing
    return MachineLimits(
        max_in_flight=routing.max_in_flight,
        max_retries=routing.max_retries,
        max_migrations=routing.max_migrations,
        migrate_s=deployment.worker.migrate_s,
        retry_budget=routing.retry_budget,
        hedge_after=routing.hedge_after,
        hedge_min_s=routing.hedge_min_s,
        queue_timeout_s=routing.queue_timeout_s,
        known_slo=strictest(deployment.slo),
    )


@dataclass(frozen=True, slots=True)
class EdgeFacts:
    """What every worker of a model must agree with: the edge's own tokenizer and golden prompts."""

    tokenizer_digest: str
    golden: tuple[GoldenPrompt, ...] = ()


def make_routers(
    deployment: Deployment,
    edge: Mapping[str, EdgeFacts],
    *,
    discovery: Discovery,
    dialer: Dialer | Callable[[Endpoint], Dialer],
    clock: Clock,
    rng: Rng,
    router_id: str,
    on_summary: Callable[[RequestSummary], None] = unobserved,
    on_decision: Callable[[float], None] = unobserved,
    profile: CalibratedProfile | None = None,
    fast_path: bool = True,
) -> Router | RouterMux:
    """One router per model of the deployment behind one port, or the only one itself. `edge` is by model
    name; the other arguments are as for `make_router`."""
    views = deployment.views()
    shared = SharedDiscovery(discovery)
    several = len(views) > 1
    recordings = Recordings(router_id, deployment.routing.policy, clock.now)
    routers = {
        view.model.name: make_router(
            view,
            tokenizer_digest=edge[view.model.name].tokenizer_digest,
            golden=edge[view.model.name].golden,
            discovery=shared.part(pool.name for pool in view.pools) if several else discovery,
            dialer=dialer,
            clock=clock,
            rng=rng,
            router_id=f"{router_id}-{number}" if several else router_id,
            on_summary=on_summary,
            on_decision=on_decision,
            profile=profile,
            fast_path=fast_path,
            taken=frozenset((*deployment.served_names(), *(route.name for route in deployment.routes))),
            recordings=recordings,
        )
        for number, view in enumerate(views)
    }
    if not several:
        return routers[deployment.model.name]
    any_model = deployment.ready_when == "any_model"
    return RouterMux(routers, shared, recordings=recordings, ready_when_any=any_model)


def make_router(
    deployment: Deployment,
    *,
    tokenizer_digest: str,
    golden: tuple[GoldenPrompt, ...] = (),
    discovery: Discovery,
    dialer: Dialer | Callable[[Endpoint], Dialer],
    clock: Clock,
    rng: Rng,
    router_id: str,
    on_summary: Callable[[RequestSummary], None] = unobserved,
    on_worker: Callable[[WorkerView], None] | None = None,
    on_decision: Callable[[float], None] = unobserved,
    profile: CalibratedProfile | None = None,
    fast_path: bool = True,
    taken: frozenset[str] = frozenset(),
    recordings: Recordings | None = None,
) -> Router:
    """A router of one model, of which `deployment` is the view; it serves while its `run` runs. `router_id`
    is unique among live routers; `dialer` reaches every worker, or makes what reaches a given one;
    `tokenizer_digest` and `golden` are the edge's own, which every worker's must equal; `on_decision` is
    called with the duration of each decision, in seconds. Costs begin with what `profile` measured. Without
    `fast_path` all deltas take the ordinary path. `taken` are names of other models, which no adapter may
    have. `recordings` are shared by the routers of a process."""
    decisions = DecisionLog(
        deployment.routing.decision_records,
        policy=deployment.routing.policy,
        stopwatch=clock.now,
        on_decision=on_decision,
    )
    priors, model = WorkerPriors(profile), deployment.model.name
    machine: RequestMachine | EmbeddingMachine
    lanes, adapters = None, None
    if deployment.embeds:
        machine = make_embedding_machine(deployment, rng)
    else:
        machine = generating = make_machine(
            deployment, rng, priors=priors, decisions=decisions, on_gap=partial(_log_gap, model)
        )
        if fast_path:
            lanes = FastPath(lambda request_id, _: generating.fast_path_of(request_id))
        if deployment.lora_loading.enabled:
            adapters = _adapter_control(deployment, generating.fleet, clock, taken)
    return Router(
        machine,
        Registry(model=model, tokenizer_digest=tokenizer_digest, golden=golden, embeds=deployment.embeds),
        discovery,
        _session_maker(deployment, dialer, clock, rng, router_id),
        clock,
        decisions=decisions,
        recordings=recordings or Recordings(router_id, deployment.routing.policy, clock.now),
        rates_from=priors.source,
        fast_path=lanes,
        adapters=adapters,
        scales_to_zero=all(deployment.scales_to_zero(pool) for pool in deployment.pools),
        on_summary=on_summary,
        on_worker=on_worker,
    )


def _session_maker(
    deployment: Deployment,
    dialer: Dialer | Callable[[Endpoint], Dialer],
    clock: Clock,
    rng: Rng,
    router_id: str,
) -> MakeSession:
    worker = deployment.worker
    limits = SessionLimits(
        link=LinkLimits(tail_messages=worker.tail_messages),
        resume_window_s=worker.resume_window_s,
        liveness_timeout_s=worker.liveness_timeout_s,
    )

    patience = SessionPatience(worker.liveness_timeout_s, HURRIED_HEARTBEATS * worker.heartbeat_s, clock.now)

    def make_session(endpoint: Endpoint, on_event: Callable[[SessionEvent], None]) -> WorkerSession:
        return WorkerSession(
            endpoint,
            dialer(endpoint) if callable(dialer) else dialer,
            clock=clock,
            rng=rng,
            on_event=on_event,
            router_id=router_id,
            limits=limits,
            patience=patience,
        )

    return make_session


def _adapter_control(
    deployment: Deployment, fleet: Fleet, clock: Clock, taken: frozenset[str]
) -> AdapterControl:
    return AdapterControl(
        deployment.model.name,
        deployment.lora_loading,
        [pool.name for pool in deployment.pools],
        clock,
        taken=taken.union(deployment.served_names()),
        serves=lambda key: fleet.missing(key) is None,
        version=lambda: fleet.changed,
    )
