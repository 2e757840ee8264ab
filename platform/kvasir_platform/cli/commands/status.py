"""`kvasir status`: running deployments, the router's view of its workers, and the processes' resources; in
the head's pod of a cluster, the pools."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from kvasir.core.errors import ConfigError, KvasirError
from kvasir_platform.cli.common.gateway_client import workers
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, duration, size, table
from kvasir_platform.cli.common.place import with_places
from kvasir_platform.cli.common.running import chosen_deployments
from kvasir_platform.cli.common.tiers import tier_troubles, tiers_cell
from kvasir_platform.cluster.local.commands import SOCKET, ControlCommand, ask
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, ProcessRecord, RuntimeDir

_CPU_SAMPLE_S = 0.25
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The resources of one process. `rss` in bytes, `cpu` in cores over a short sample."""

    pid: int
    name: str
    rss: int
    cpu: float


def status(name: str | None, output: CommandOutput) -> int:
    """Show every running deployment (or the named one). Return 1 if none runs. In a pod of a control process,
    show its pools; raises UpstreamError if that does not answer."""
    if socket := os.environ.get(SOCKET):
        return _pools(Path(socket), output)
    found = chosen_deployments(name)
    if not found:
        output.text(f"nothing runs{f' under the name {name}' if name else ''}; start with: kvasir up")
        output.data([])
        return 1
    reports = [_report(runtime, state) for runtime, state in found]
    output.data(reports)
    for report in reports:
        _print(report, output)
    return 0


def _pools(socket: Path, output: CommandOutput) -> int:
    for answer in ask(socket, ControlCommand("status", ""), _ANSWER_S):
        if answer["event"] == "refused":
            raise ConfigError(str(answer["message"]))
        output.data(answer["pools"])
        rows = [
            (each["pool"], each["state"], f"{each['running']} of {each['wanted']}", each["detail"])
            for each in answer["pools"]
        ]
        output.text(table(("POOL", "STATE", "RUNNING", "DETAIL"), rows))
    return 0


def _report(runtime: RuntimeDir, state: DeploymentState) -> dict[str, Any]:
    running = runtime.holder() is not None
    site = Site.of_state(state) if state.address else None
    seen: Sequence[dict[str, Any]] = ()
    problem = "" if running else "its supervisor was killed; `kvasir down` cleans up"
    if running and site is not None:
        try:
            seen = workers(site)
        except KvasirError as error:
            problem = error.message
    supervisor = ProcessRecord(state.pid, 0.0, "kvasir up")
    records = ((supervisor,) if running else ()) + state.processes
    return {
        "name": state.name,
        "model": state.model,
        "phase": state.phase if running else "crashed",
        "address": state.address,
        "url": "" if site is None else site.url,
        "uptime_s": max(0.0, time.time() - state.started_at),
        "problem": problem,
        "workers": list(seen),
        "replicas": [asdict(replica) for replica in state.replicas] if running else [],
        "processes": [asdict(use) for use in measure(records)],
        "logs": state.logs,
    }


def measure(
    records: Sequence[ProcessRecord], pause: Callable[[float], None] = time.sleep
) -> list[ProcessUse]:
    """Return memory and CPU of live processes, largest first. A record without a start time is trusted."""
    live: list[tuple[ProcessRecord, psutil.Process]] = []
    for record in records:
        try:
            process = psutil.Process(record.pid)
            if record.created and abs(process.create_time() - record.created) > 0.1:
                continue
            process.cpu_percent()
            live.append((record, process))
        except psutil.Error:
            continue
    pause(_CPU_SAMPLE_S)
    uses = []
    for record, process in live:
        try:
            cpu = process.cpu_percent() / 100.0
            uses.append(ProcessUse(record.pid, record.name, process.memory_info().rss, cpu))
        except psutil.Error:
            continue
    return sorted(uses, key=lambda use: -use.rss)


def _print(report: dict[str, Any], output: CommandOutput) -> None:
    address = report["url"] or "no address yet"
    uptime = duration(report["uptime_s"])
    output.text(f"{report['name']}: {report['phase']}, {report['model']} at {address}, up {uptime}")
    if report["problem"]:
        output.text(f"  {report['problem']}")
    if report["workers"]:
        head = ("WORKER", "POOL", "STATE", "IN FLIGHT", "RUNNING", "WAITING", "KV USED", "TIERS", "REASON")
        workers = report["workers"]
        output.text("\n" + table(*with_places(head, [worker_row(worker) for worker in workers], workers)))
    if report["replicas"]:
        columns = ("replica_id", "pool", "state", "detail")
        rows = [tuple(each[column] for column in columns) for each in report["replicas"]]
        output.text("\n" + table(("REPLICA", "POOL", "STATE", "DETAIL"), rows))
    if report["processes"]:
        rows = [
            (str(use["pid"]), size(use["rss"]), f"{use['cpu']:.2f}", use["name"])
            for use in report["processes"]
        ]
        output.text("\n" + table(("PID", "RSS", "CPU", "PROCESS"), rows))
        total = sum(use["rss"] for use in report["processes"])
        output.text(f"{len(rows)} processes, {size(total)} resident (shared pages counted in each)")
    output.text(f"\nlogs: {report['logs']}")


def worker_row(worker: dict[str, Any]) -> tuple[str, ...]:
    """Format one line of the table of workers, from a WorkerView as JSON."""
    load = worker.get("load") or {}
    usage = load.get("kv_usage")
    lent = f"does {worker['assigned']} work" if worker.get("assigned") else ""
    reasons = [lent, worker.get("reason"), (worker.get("health") or {}).get("reason"), *tier_troubles(load)]
    return (
        str(worker.get("worker_id", "?")),
        str(worker.get("pool", "?")),
        str(worker.get("state", "?")),
        str(worker.get("in_flight", 0)),
        str(load.get("running", "-")),
        str(load.get("waiting", "-")),
        "-" if usage is None else f"{usage:.0%}",
        tiers_cell(load),
        "; ".join(why for why in reasons if why),
    )
