"""Decides which workers hold which adapters.

What workers report is the only record: each report says how many workers of a pool should hold the adapter,
so that any router, also a restarted one, finds out what is missing. Decisions depend on nothing else, so that
several routers choose the same workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvasir.core.adapters import HeldAdapter
from kvasir.core.errors import CapacityError, RequestError


@dataclass(frozen=True, slots=True)
class AdapterWorker:
    """A worker of the model. `ready`: it takes new work; `connected`: it can be given orders."""

    worker_id: str
    pool: str
    ready: bool
    connected: bool
    held: tuple[HeldAdapter, ...] = ()


def choose(workers: Iterable[AdapterWorker], pools: Sequence[str], replicas: int, most: int) -> list[str]:
    """Return the workers that load an additional adapter: `replicas` of each pool, 0 for all, those with the
    fewest adapters first. Raise CapacityError if a pool has too few that are ready, RequestError
    (adapter_limit) if too many hold `most` already."""
    known, chosen = list(workers), []
    for pool in pools:
        ready = [each for each in known if each.pool == pool and each.ready]
        needed = replicas or max(1, len(ready))
        if len(ready) < needed:
            raise CapacityError(
                f"Pool {pool} has {len(ready)} ready workers, and the adapter needs {needed}; `kvasir get "
                "workers` shows their states.",
                code="not_ready",
            )
        room = sorted((each for each in ready if len(each.held) < most), key=_load)
        if len(room) < needed:
            raise RequestError(
                f"Pool {pool} has {len(room)} workers with room for an adapter, and it needs {needed}; "
                f"unload one, or raise lora_loading.max_adapters ({most}) in kvasir.yaml.",
                status=409,
                code="adapter_limit",
            )
        chosen += [each.worker_id for each in room[:needed]]
    return chosen


def wanted(workers: Iterable[AdapterWorker]) -> dict[str, HeldAdapter]:
    """Return the adapters that should be held, by name: of several with one name, that of most workers. One
    that is being unloaded anywhere is not wanted."""
    known = list(workers)
    count = Counter(held.key for worker in known for held in worker.held)
    retiring = {held.name for worker in known for held in worker.held if held.retiring}
    found: dict[str, HeldAdapter] = {}
    for worker in sorted(known, key=lambda each: each.worker_id):
        for held in worker.held:
            best = found.get(held.name)
            if held.name not in retiring and (best is None or _rank(held, count) < _rank(best, count)):
                found[held.name] = held
    return found


def missing_copies(
    workers: Iterable[AdapterWorker], pools: Sequence[str], most: int, busy: Container[str] = ()
) -> list[tuple[str, HeldAdapter]]:
    """Return the workers that should load an adapter that too few hold, with that adapter. Adapters whose
    names are in `busy` are left out."""
    known = list(workers)
    extra: Counter[str] = Counter()
    found: list[tuple[str, HeldAdapter]] = []
    for name, adapter in sorted(wanted(known).items()):
        if name in busy:
            continue
        for pool in pools:
            members = [each for each in known if each.pool == pool and (each.ready or _holds(each, name))]
            lacking = [each for each in members if each.ready and not _holds(each, name)]
            needed = min(adapter.replicas or len(members), len(members))
            needed -= len(members) - len(lacking)
            room = [each for each in lacking if len(each.held) + extra[each.worker_id] < most]
            for each in sorted(room, key=_load)[: max(0, needed)]:
                extra[each.worker_id] += 1
                found.append((each.worker_id, adapter))
    return found


def _holds(worker: AdapterWorker, name: str) -> bool:
    return any(held.name == name for held in worker.held)


def _load(worker: AdapterWorker) -> tuple[int, str]:
    return len(worker.held), worker.worker_id


def _rank(held: HeldAdapter, count: Counter[str]) -> tuple[int, str]:
    return -count[held.key], held.key
