"""`kvasir get workers`: each worker's blocks, how well the router knows them, and its health."""

from __future__ import annotations

from typing import Any

from kvasir_platform.cli.common.gateway_client import workers
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, number, table
from kvasir_platform.cli.common.place import with_places
from kvasir_platform.cli.common.tiers import tier_troubles, tiers_cell

_HEAD = (
    "WORKER", "POOL", "ROLE", "STATE", "HEALTH", "KV", "BLOCKS", "PREDICTED", "RESYNCS",
    "IN FLIGHT", "RUNNING", "WAITING", "KV USED", "TIERS", "REASON",
)  # fmt: skip
_NOT_JUDGED = ("connecting", "refused")
_NUMBERS = range(_HEAD.index("BLOCKS"), _HEAD.index("TIERS"))


def get_workers(site: Site, output: CommandOutput) -> int:
    """Print one line for each worker that discovery names. Raises the errors of the gateway client."""
    found = workers(site)
    output.data(list(found))
    if found:
        head, rows = with_places(_HEAD, [_row(worker) for worker in found], found)
        output.text(table(head, rows, _NUMBERS))
    else:
        output.text("the router knows no worker; `kvasir status` shows replicas that have not joined")
    return 0


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    load, kv, health = (worker.get(part) or {} for part in ("load", "kv", "health"))
    usage = load.get("kv_usage")
    reasons = [worker.get("reason"), health.get("reason"), kv.get("reason"), *tier_troubles(load)]
    return (
        str(worker.get("worker_id", "?")),
        str(worker.get("pool", "?")),
        str(worker.get("assigned") or worker.get("role") or "-"),
        str(worker.get("state", "?")),
        _health(health) if worker.get("state") not in _NOT_JUDGED else "-",
        str(kv.get("state", "-")),
        number(kv.get("blocks")),
        number(kv.get("predicted_blocks")),
        number(kv.get("resyncs")),
        number(worker.get("in_flight")),
        number(load.get("running")),
        number(load.get("waiting")),
        "-" if usage is None else f"{usage:.0%}",
        tiers_cell(load),
        "; ".join(why for why in reasons if why),
    )


def _health(health: dict[str, Any]) -> str:
    """Return the state, with the share of a worker in slow start, and the remaining time of an ejection."""
    state = str(health.get("state", "-"))
    if state == "slow_start":
        state += f" {health.get('share', 0.0):.0%}"
    elif state == "ejected":
        state += f" {health.get('for_s', 0.0):.1f}s"
    return f"{state} (panic)" if health.get("panic") else state
