"""The known workers, which of them may serve, and why the others may not.

A worker that does not match (another model, tokenizer, block size, KV dtype or layout) is refused with both
sides shown, because serving with it would give wrong tokens or a cold cache without an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import WorkerIdentity, registration_conflicts
from kvasir.core.kv import KvStatus
from kvasir.core.membership import Endpoint
from kvasir.core.requests import EngineLoad, Role
from kvasir.ports.router import HealthView, WorkerView

CONNECTING = "connecting"
READY = "ready"
INTERRUPTED = "interrupted"
DRAINING = "draining"
REFUSED = "refused"


@dataclass(slots=True)
class Registration:
    """One known worker. `identity` is None while no session is up."""

    endpoint: Endpoint
    state: str = CONNECTING
    reason: str = ""
    identity: WorkerIdentity | None = None

    @property
    def serves(self) -> bool:
        """Whether the worker was accepted and its session is up."""
        return self.identity is not None and self.state != REFUSED

    def view(
        self,
        load: EngineLoad | None,
        in_flight: int,
        kv: KvStatus | None = None,
        health: HealthView | None = None,
        assigned: Role | None = None,
    ) -> WorkerView:
        """Return the view for status and metrics."""
        return WorkerView(
            worker_id=self.endpoint.worker_id,
            address=self.endpoint.address,
            pool=self.endpoint.pool,
            state=self.state,
            reason=self.reason,
            identity=self.identity,
            load=load,
            in_flight=in_flight,
            kv=kv,
            health=health or HealthView(),
            assigned=assigned,
        )


class Registry:
    """All workers of one model, by endpoint id. `golden` are the edge's golden prompts; `embeds`: the model
    makes embeddings."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer_digest: str,
        golden: tuple[GoldenPrompt, ...] = (),
        embeds: bool = False,
    ) -> None:
        self.model = model
        self._tokenizer_digest = tokenizer_digest
        self._golden = golden
        self._embeds = embeds
        self._known: dict[str, Registration] = {}

    def __getitem__(self, worker_id: str) -> Registration:
        """Return the view of a worker. Raises KeyError for an unknown one."""
        return self._known[worker_id]

    def all(self) -> list[Registration]:
        """Return all views, by pool and id."""
        return sorted(self._known.values(), key=lambda r: (r.endpoint.pool, r.endpoint.worker_id))

    def add(self, endpoint: Endpoint) -> None:
        """Discovery reports a worker; its session is connecting."""
        self._known[endpoint.worker_id] = Registration(endpoint)

    def remove(self, worker_id: str) -> None:
        """Discovery no longer reports the worker."""
        self._known.pop(worker_id, None)

    def note(self, worker_id: str, state: str, reason: str = "") -> None:
        """Set the state of a known worker."""
        known = self._known[worker_id]
        known.state, known.reason = state, reason
        if state == CONNECTING:
            known.identity = None

    def located(self, worker_id: str, identity: WorkerIdentity) -> WorkerIdentity:
        """Return the identity of a known worker, with what discovery knows of its place where the worker
        reports nothing."""
        locality = identity.locality.completed(self._known[worker_id].endpoint.locality)
        return identity if locality == identity.locality else replace(identity, locality=locality)

    def register(self, worker_id: str, identity: WorkerIdentity) -> bool:
        """Accept or refuse a worker by its identity; the view has the reasons."""
        known = self._known[worker_id]
        peers = tuple(
            other.identity
            for other in self._known.values()
            if other is not known and other.identity is not None and other.serves
        )
        conflicts = registration_conflicts(
            identity,
            model=self.model,
            tokenizer_digest=self._tokenizer_digest,
            peers=peers,
            golden=self._golden,
            embeds=self._embeds,
        )
        known.identity = identity
        known.state = REFUSED if conflicts else READY
        known.reason = "; ".join(conflicts)
        return not conflicts

    def refused(self) -> list[tuple[str, WorkerIdentity]]:
        """Return workers with a session that were refused: they are checked again when a peer leaves."""
        return [
            (worker_id, known.identity)
            for worker_id, known in self._known.items()
            if known.state == REFUSED and known.identity is not None
        ]
