"""Whether all is well with a deployment, and if not, what is wrong and what to do: a pure function of what
its router knows.

Problems are ranked by what clients notice. Workers with the same problem make one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.core.kv import KvState
from kvasir.ports.router import AdmissionView, CellView, EndedRequests, WorkerView
from kvasir_platform.gateway.openai.schema.operation import PoolSize, Severity, StatusProblem, StatusVerdict
from kvasir_platform.gateway.operator.recent_requests import problems_of_requests

SEVERITIES: tuple[Severity, ...] = ("down", "degraded", "warning")
_PRESSURE = 0.25
"""The expected wait, as a fraction of the promised TTFT, from which it is a problem: as the alert's."""
_FULL = 0.95
_STALE_INDEX_S = 10.0
_PLANNER_S = 10.0
_DISCOVERY_S = 60.0
_DAY_S = 86_400.0
_EXPIRES_S = 14 * _DAY_S
_CHOSEN = ("its pool is routed to by prediction", "the worker does not report what it holds")
"""Reasons of PREDICTED that the deployment spec asks for."""
_NAMED = 3
_AWAY = ("lost", "returning", "unreachable")
"""States of a cell in which it gets no requests."""
_GREEDY = 0.8
"""The share of all requests, while some wait, from which one tenant of several is said to take too much: as
the alert's."""
_TENANTS = 2
_MANY = 10
_LEADS = {"down": "Requests fail", "degraded": "Service is degraded", "warning": "Requests are served, but"}


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """What is judged. `readiness` says by model what is missing to serve it, None if nothing is;
    `certificates` has the seconds that each certificate file is still valid; `now` reads the clock of the
    workers' and requests' times. `ended` are the requests of each model that ended last, `tenants` has the
    accepted requests of each tenant that have not ended; it is needed while requests wait. `cells` are those
    of a deployment over several regions."""

    now: float = 0.0
    stopping: bool = False
    readiness: Mapping[str, str | None] = field(default_factory=dict)
    workers: Sequence[WorkerView] = ()
    pools: Sequence[PoolSize] = ()
    queues: Mapping[str, AdmissionView] = field(default_factory=dict)
    in_flight: int = 0
    planner_inactive_s: float = 0.0
    discovery_stale_s: float = 0.0
    limits_shared: bool | None = None
    certificates: Mapping[str, float] = field(default_factory=dict)
    ended: Sequence[EndedRequests] = ()
    tenants: Mapping[str, int] = field(default_factory=dict)
    cells: Sequence[CellView] = ()


def verdict_of(facts: StatusFacts) -> StatusVerdict:
    """Return the sentence and the problems."""
    return verdict(problems_of(facts), _well(facts))


def verdict(problems: Sequence[StatusProblem], well: str) -> StatusVerdict:
    """Return a verdict on problems in any order; `well` is the sentence if there is none."""
    ranked = sorted(problems, key=lambda each: SEVERITIES.index(each.severity))
    if not ranked:
        return StatusVerdict(True, well, [])
    first, more = ranked[0], len(ranked) - 1
    rest = f" ({more} more below.)" if more else ""
    lead = _LEADS[first.severity]
    colon = "" if first.severity == "warning" else ":"
    sentence = f"{lead}{colon} {first.text}. {first.remedy[:1].upper()}{first.remedy[1:]}.{rest}"
    return StatusVerdict(False, sentence, ranked)


def problems_of(facts: StatusFacts) -> list[StatusProblem]:
    """Return what is wrong."""
    if facts.stopping:
        text, remedy = "the router is stopping", "start it again, or wait for the one that replaces it"
        return [StatusProblem("down", "stopping", "router", text, remedy)]
    return [
        *_models(facts),
        *_queues(facts),
        *_greedy(facts),
        *problems_of_requests(facts.ended, facts.now),
        *_panics(facts.workers),
        *_states(facts.workers),
        *_pools(facts),
        *_caches(facts),
        *_tiers(facts.workers),
        *_surroundings(facts),
        *_certificates(facts.certificates),
        *_cells(facts.cells),
    ]


def _well(facts: StatusFacts) -> str:
    serving, models = sum(pool.serving for pool in facts.pools), len(facts.readiness)
    return (
        f"All is well: {_count(serving, 'worker')} {'serves' if serving == 1 else 'serve'} "
        f"{_count(models, 'model')}, {_count(facts.in_flight, 'request')} running."
    )


def _models(facts: StatusFacts) -> Iterator[StatusProblem]:
    for model, missing in facts.readiness.items():
        if missing is not None:
            remedy = "see which workers are missing, and why: `kvasir get workers`, `kvasir logs POOL`"
            yield StatusProblem("down", "not_ready", model, f"{model} is not served: {missing}", remedy)
        elif (queue := facts.queues.get(model)) is not None and queue.parked:
            waiting = _count(queue.parked, "request")
            text = f"{waiting} for {model} wait, and no worker can take them"
            yield StatusProblem("down", "no_workers", model, text, "see why: `kvasir get workers`")


def _queues(facts: StatusFacts) -> Iterator[StatusProblem]:
    for model, queue in facts.queues.items():
        if queue.brownout.level:
            text = f"{model} is in brown-out ({queue.brownout.text})"
            remedy = "add workers, or reduce the load; docs/RUNBOOK.md says what clients see"
            yield StatusProblem("degraded", "brownout", model, text, remedy)
        if queue.pressure > _PRESSURE:
            missed = queue.pressure > 1.0
            text = (
                f"a typical request to {model} waits {queue.wait_s:.1f} s, {queue.pressure:.0%} of its "
                f"promised time to first token ({queue.queued:,} wait)"
            )
            remedy = "add workers (`kvasir scale POOL=N`), or find who sends so much: `kvasir top`"
            yield StatusProblem("degraded" if missed else "warning", "queue_wait", model, text, remedy)
        if queue.queued and queue.kv_tokens and queue.reserved_tokens >= _FULL * queue.kv_tokens:
            text = f"KV memory for {model} is full, and {_count(queue.queued, 'request')} wait for it"
            remedy = "add workers that decode, or raise engine.kv_cache_bytes"
            yield StatusProblem("degraded", "kv_full", model, text, remedy)


def _greedy(facts: StatusFacts) -> Iterator[StatusProblem]:
    waiting = sum(queue.queued for queue in facts.queues.values())
    total = sum(facts.tenants.values())
    if not waiting or len(facts.tenants) < _TENANTS or total < _MANY:
        return
    tenant, most = max(facts.tenants.items(), key=lambda each: each[1])
    if most >= _GREEDY * total:
        text = f"tenant {tenant} has {most / total:.0%} of the {total:,} requests that run or wait"
        remedy = f"limit its `concurrency` in kvasir.yaml; see what it sends: `kvasir tail --tenant {tenant}`"
        yield StatusProblem("warning", "greedy_tenant", tenant, text, remedy)


def _panics(workers: Sequence[WorkerView]) -> Iterator[StatusProblem]:
    for pool in sorted({view.pool for view in workers if view.health.panic}):
        text = f"too many workers of pool {pool} look unhealthy, so requests are sent to all of them"
        remedy = f"read their logs: `kvasir logs {pool}`; look for what they share (node, network, image)"
        yield StatusProblem("degraded", "panic", pool, text, remedy)


def _states(workers: Sequence[WorkerView]) -> Iterator[StatusProblem]:
    """Workers that do not serve, or are avoided, one problem for each pool and reason."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for view in workers:
        state, reason = view.state, view.reason
        if state not in _STATES:
            state, reason = view.health.state, view.health.reason
        if state in _STATES:
            groups.setdefault((state, view.pool, reason), []).append(view.worker_id)
    for (state, _, reason), names in groups.items():
        severity, verb, remedy = _STATES[state]
        text = f"{_names(names)} {verb if len(names) == 1 else _plural(verb)}"
        text += f" ({reason})" if reason else ""
        yield StatusProblem(severity, f"worker_{state}", names[0], text, remedy.format(names[0]))


_STATES: Mapping[str, tuple[Severity, str, str]] = {
    "refused": (
        "degraded",
        "is refused",
        "make it and the deployment agree on what the reason names, and restart it: `kvasir restart POOL`",
    ),
    "interrupted": (
        "degraded",
        "has lost its connection",
        "check its process and the network: `kvasir logs {}`",
    ),
    "ejected": ("degraded", "is ejected", "read its log: `kvasir logs {}`; replace it if that goes on"),
    "unresponsive": ("degraded", "does not respond", "check its process and node: `kvasir logs {}`"),
    "probing": ("warning", "is tried out after a failure", "wait; read its log if it is ejected again"),
    "connecting": ("warning", "is not connected", "wait if it starts; else read its log: `kvasir logs {}`"),
    "draining": ("warning", "drains", "undo that with `kvasir drain {} --undo`, or let it end"),
}
"""By the state of a worker, or else of its health: how severe it is, what the worker does, and the remedy."""


def _plural(verb: str) -> str:
    """Return the verb for several workers."""
    first, _, rest = verb.partition(" ")
    plural = {"is": "are", "has": "have", "does": "do", "drains": "drain"}.get(first, first)
    return f"{plural} {rest.replace('its', 'their')}".strip()


def _pools(facts: StatusFacts) -> Iterator[StatusProblem]:
    known = Counter(view.pool for view in facts.workers)
    for pool in facts.pools:
        # Workers that are known and do not serve, such as those that drain, are problems of their own.
        short = pool.desired - max(pool.serving, known[pool.pool])
        if short <= 0:
            continue
        starts = f", {pool.starting} of the others start" if pool.starting else ""
        text = f"{pool.serving} of {pool.desired} replicas of pool {pool.pool} serve{starts}"
        remedy = (
            "wait for those that start"
            if pool.starting >= short
            else f"see why the others do not: `kvasir logs {pool.pool}`; if they should not, set `replicas`"
        )
        severity: Severity = "warning" if pool.serving or pool.starting >= short else "degraded"
        yield StatusProblem(severity, "pool_short", pool.pool, text, remedy)


def _caches(facts: StatusFacts) -> Iterator[StatusProblem]:
    for view in facts.workers:
        load, kv = view.load, view.kv
        if load is not None and load.waiting and load.kv_usage >= _FULL:
            text = (
                f"KV memory of {view.worker_id} is full ({load.kv_usage:.0%}), and "
                f"{_count(load.waiting, 'request')} wait in its engine"
            )
            remedy = "add workers to its pool, or raise engine.kv_cache_bytes"
            yield StatusProblem("degraded", "worker_kv_full", view.worker_id, text, remedy)
        if kv is None or view.state != "ready":
            continue
        late = kv.state is KvState.CATCHING_UP and facts.now - kv.since_s > _STALE_INDEX_S
        if late or (kv.state is KvState.PREDICTED and kv.reason and kv.reason not in _CHOSEN):
            text = f"the index does not know what {view.worker_id} has cached ({kv.reason or kv.state.value})"
            remedy = (
                "docs/OPERATIONS.md says what to do for each reason; prefixes are found less often meanwhile"
            )
            yield StatusProblem("warning", "stale_index", view.worker_id, text, remedy)


def _tiers(workers: Sequence[WorkerView]) -> Iterator[StatusProblem]:
    found: dict[tuple[str, str, bool], list[str]] = {}
    for view in workers:
        for tier in view.load.tiers if view.load is not None else ():
            if tier.trouble:
                key = (tier.medium.name.lower(), tier.trouble, tier.readable)
                found.setdefault(key, []).append(view.worker_id)
    for (tier_name, trouble, readable), names in found.items():
        state = "has trouble" if readable else "cannot be read"
        text = f"the {tier_name} tier of {_names(names)} {state}: {trouble}"
        remedy = "requests are served without it; do what the message says"
        yield StatusProblem("warning" if readable else "degraded", "tier", names[0], text, remedy)


def _surroundings(facts: StatusFacts) -> Iterator[StatusProblem]:
    if facts.limits_shared is False:
        text = "Redis does not answer, so each router counts tenants' limits by itself"
        remedy = "check the server of tenancy.redis; a tenant may exceed its limits meanwhile"
        yield StatusProblem("degraded", "limits_not_shared", "redis", text, remedy)
    if facts.planner_inactive_s > _PLANNER_S:
        text = f"the planner has not answered for {facts.planner_inactive_s:.0f} s, so pools keep their sizes"
        remedy = "check the control process: `kvasir explain scaling`, and its log: `kvasir logs control`"
        yield StatusProblem("warning", "planner_inactive", "planner", text, remedy)
    if facts.discovery_stale_s > _DISCOVERY_S:
        text = (
            f"workers have not been looked up for {facts.discovery_stale_s:.0f} s, so new ones are not found"
        )
        remedy = "check Ray's head, or the API server; the router's log has the reason: `kvasir logs router`"
        yield StatusProblem("warning", "discovery_stale", "discovery", text, remedy)


def _certificates(certificates: Mapping[str, float]) -> Iterator[StatusProblem]:
    for path, left_s in certificates.items():
        remedy = f"replace {path} and its key; they are loaded without a restart"
        if left_s <= 0.0:
            yield StatusProblem(
                "down", "certificate_expired", path, f"the certificate {path} has expired", remedy
            )
        elif left_s < _EXPIRES_S:
            left = f"{left_s / _DAY_S:.0f} days" if left_s >= 2 * _DAY_S else f"{left_s / 3600:.0f} hours"
            severity: Severity = "warning" if left_s >= _DAY_S else "degraded"
            text = f"the certificate {path} expires in {left}"
            yield StatusProblem(severity, "certificate_expires", path, text, remedy)


def _names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"worker {names[0]}"
    more = ", …" if len(names) > _NAMED else ""
    return f"{len(names)} workers ({', '.join(names[:_NAMED])}{more})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cells(cells: Sequence[CellView]) -> Iterator[StatusProblem]:
    for cell in cells:
        if cell.state in _AWAY:
            text = f"cell {cell.cell} is {cell.state}: {cell.reason}"
            remedy = "check the network to it, and `kvasir status` there; other cells serve meanwhile"
            yield StatusProblem("warning", "cell_away", cell.cell, text, remedy)
