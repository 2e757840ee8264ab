"""Puts a router together as the deployment spec says; which adapters it stands on is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.config.spec import Deployment
from kvasir.core.link import LinkLimits
from kvasir.core.membership import Endpoint
from kvasir.core.requests import Request
from kvasir.native import chain_hashes, root_hash
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.discovery import Discovery
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir.ports.routing import Rates
from kvasir.ports.session import Dialer
from kvasir_router.decide import RateBook, make_policy
from kvasir_router.fleet import Fleet
from kvasir_router.index import PrefixIndex
from kvasir_router.machine import MachineLimits, RequestMachine
from kvasir_router.registry import Registry
from kvasir_router.session import SessionEvent, SessionLimits, WorkerSession
from kvasir_router.shell import Router, unobserved


def hash_blocks(request: Request, block_size: int) -> tuple[int, ...]:
    """The names of the prompt's whole blocks, which no other model, salt or adapter shares."""
    root = root_hash(request.model, request.salt, request.adapter or "")
    return tuple(chain_hashes(request.tokens, block_size, root))


def make_machine(deployment: Deployment, rng: Rng, *, priors: Rates | None = None) -> RequestMachine:
    """The decisions alone, as production, simulation and replay run them."""
    routing = deployment.routing
    fleet = Fleet(
        make_policy(routing.policy, deployment.disaggregation, rng),
        PrefixIndex(capacity_blocks=routing.index_blocks, ttl_s=routing.predicted_ttl_s),
        RateBook(priors or Rates()),
        hash_blocks=hash_blocks,
        expected_output_tokens=deployment.gateway.default_max_tokens,
    )
    limits = MachineLimits(
        max_queue=routing.max_queue,
        max_in_flight=routing.max_in_flight,
        max_retries=routing.max_retries,
        queue_timeout_s=routing.queue_timeout_s,
    )
    return RequestMachine(fleet, limits)


def make_router(
    deployment: Deployment,
    *,
    tokenizer_digest: str,
    discovery: Discovery,
    dialer: Dialer,
    clock: Clock,
    rng: Rng,
    router_id: str,
    on_summary: Callable[[RequestSummary], None] = unobserved,
    on_worker: Callable[[WorkerView], None] = unobserved,
) -> Router:
    """A router that serves as long as its `run` does. `router_id` is unique among live routers;
    `tokenizer_digest` is the edge's own, which every worker's must equal."""
    limits = SessionLimits(
        link=LinkLimits(tail_messages=deployment.worker.tail_messages),
        resume_window_s=deployment.worker.resume_window_s,
    )

    def make_session(endpoint: Endpoint, on_event: Callable[[SessionEvent], None]) -> WorkerSession:
        return WorkerSession(
            endpoint,
            dialer,
            clock=clock,
            rng=rng,
            on_event=on_event,
            router_id=router_id,
            limits=limits,
        )

    return Router(
        make_machine(deployment, rng),
        Registry(model=deployment.model.name, tokenizer_digest=tokenizer_digest),
        discovery,
        make_session,
        clock,
        on_summary=on_summary,
        on_worker=on_worker,
    )
