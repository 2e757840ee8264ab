"""`kvasir get workers`: which worker holds what, and how well the router knows it."""

from __future__ import annotations

from typing import Any

from kvasir_platform.cli.gateway_client import workers
from kvasir_platform.cli.output import Output, table
from kvasir_platform.cli.running import gateway_address

_HEAD = (
    "WORKER", "POOL", "ROLE", "STATE", "KV", "BLOCKS", "PREDICTED", "RESYNCS",
    "IN FLIGHT", "RUNNING", "WAITING", "KV USED", "REASON",
)  # fmt: skip
_NUMBERS = range(_HEAD.index("BLOCKS"), _HEAD.index("REASON"))


def get_workers(name: str | None, address: str | None, output: Output) -> int:
    """One line for each worker that discovery names. Raises what asking the gateway raises."""
    found = workers(gateway_address(name, address))
    output.data(list(found))
    if found:
        output.text(table(_HEAD, [_row(worker) for worker in found], _NUMBERS))
    else:
        output.text("the router knows no worker; `kvasir status` shows replicas that have not joined")
    return 0


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    load, kv = worker.get("load") or {}, worker.get("kv") or {}
    usage = load.get("kv_usage")
    return (
        str(worker.get("worker_id", "?")),
        str(worker.get("pool", "?")),
        str(worker.get("role") or "-"),
        str(worker.get("state", "?")),
        str(kv.get("state", "-")),
        _count(kv.get("blocks")),
        _count(kv.get("predicted_blocks")),
        _count(kv.get("resyncs")),
        _count(worker.get("in_flight")),
        _count(load.get("running")),
        _count(load.get("waiting")),
        "-" if usage is None else f"{usage:.0%}",
        "; ".join(why for why in (worker.get("reason"), kv.get("reason")) if why),
    )


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"
