"""`kvasir status`: first a sentence on whether all is well, then the router's view of its workers, and the
processes' resources; in the head's pod of a cluster, the pools."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from msgspec import to_builtins

from kvasir.core.errors import ConfigError, KvasirError, UpstreamError
from kvasir_platform.cli.commands.status.cells import print_cells
from kvasir_platform.cli.commands.status.local_problems import ControlFacts, judged, pool_problems
from kvasir_platform.cli.common.gateway_client import status_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, duration, size, table
from kvasir_platform.cli.common.place import with_places
from kvasir_platform.cli.common.running import chosen_deployments
from kvasir_platform.cli.common.tiers import tier_troubles, tiers_cell
from kvasir_platform.cluster.local.commands import SOCKET, ControlCommand, ask, socket_path
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, ProcessRecord, RuntimeDir
from kvasir_platform.gateway.openai.schema.operation import StatusVerdict
from kvasir_platform.gateway.operator.verdict import verdict

_CPU_SAMPLE_S = 0.25
_ANSWER_S = 30.0
_PLANNER_S = 3.0


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The resources of one process. `rss` in bytes, `cpu` in cores over a short sample."""

    pid: int
    name: str
    rss: int
    cpu: float


def status(name: str | None, output: CommandOutput) -> int:
    """Show every running deployment (or the named one). Return 1 if none runs, or if requests to one fail or
    are served worse than promised. In a pod of a control process, show its pools; raises UpstreamError if
    that does not answer."""
    if socket := os.environ.get(SOCKET):
        return _pools(Path(socket), output)
    found = chosen_deployments(name)
    if not found:
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        remedy = (
            "name the gateway: kvasir status --address 127.0.0.1:8000" if in_pod else "start with: kvasir up"
        )
        output.text(f"nothing runs{f' under the name {name}' if name else ''}; {remedy}")
        output.data([])
        return 1
    reports = [_report(runtime, state) for runtime, state in found]
    output.data(reports)
    for report in reports:
        _print(report, output)
    return int(any(_is_bad(report["verdict"]) for report in reports))


def gateway_status(site: Site, output: CommandOutput) -> int:
    """Show a gateway's verdict and its workers. Return 1 if requests fail or are served worse than promised.
    Raises the errors of the gateway client."""
    page = status_of(site)
    found = page.get("verdict") or to_builtins(StatusVerdict(True, "The gateway gives no verdict.", []))
    output.data(page)
    _print_verdict(found, output)
    output.text(
        f"{page.get('deployment', '?')} at {site.url}, {page.get('in_flight', 0):,} requests in flight"
    )
    _print_workers(page["workers"], output)
    _print_routes(page.get("routes") or (), output)
    print_cells(page.get("cells") or (), output)
    return int(_is_bad(found))


def _is_bad(found: dict[str, Any]) -> bool:
    return any(problem["severity"] != "warning" for problem in found["problems"])


def _pools(socket: Path, output: CommandOutput) -> int:
    for answer in ask(socket, ControlCommand("status", ""), _ANSWER_S):
        if answer["event"] == "refused":
            raise ConfigError(str(answer["message"]))
        pools = answer["pools"]
        output.data(pools)
        found = verdict(list(pool_problems(pools)), "All is well: every pool has its replicas.")
        _print_verdict(to_builtins(found), output)
        rows = [
            (each["pool"], each["state"], f"{each['running']} of {each['wanted']}", each["detail"])
            for each in pools
        ]
        output.text(table(("POOL", "STATE", "RUNNING", "DETAIL"), rows))
        return int(_is_bad(to_builtins(found)))
    return 1


def _report(runtime: RuntimeDir, state: DeploymentState) -> dict[str, Any]:
    running = runtime.holder() is not None
    site = Site.of_state(state) if state.address else None
    page: dict[str, Any] | None = None
    problem = "" if running else "its supervisor was killed; `kvasir down` cleans up"
    if running and site is not None:
        try:
            page = status_of(site)
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
        "verdict": to_builtins(
            judged(
                state, page, problem, running=running, control=None if page is None else control_facts(state)
            )
        ),
        "routes": [] if page is None else list(page.get("routes") or ()),
        "cells": [] if page is None else list(page.get("cells") or ()),
        "workers": [] if page is None else [each for each in page["workers"] if isinstance(each, dict)],
        "replicas": [asdict(replica) for replica in state.replicas] if running else [],
        "processes": [asdict(use) for use in measure(records)],
        "logs": state.logs,
    }


def control_facts(state: DeploymentState) -> ControlFacts:
    """Return what the control process of a deployment says; nothing if it does not answer."""
    try:
        for answer in ask(socket_path(Path(state.temp_dir)), ControlCommand("explain", ""), _PLANNER_S):
            if answer["event"] != "refused":
                story = answer["explanation"]
                sizes = {each["pool"]: each["size"] for each in story["by_hand"]}
                return ControlFacts(story.get("frozen") or "", sizes)
    except UpstreamError:
        pass
    return ControlFacts()


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
    _print_verdict(report["verdict"], output)
    address = report["url"] or "no address yet"
    uptime = duration(report["uptime_s"])
    output.text(f"{report['name']}: {report['phase']}, {report['model']} at {address}, up {uptime}")
    _print_workers(report["workers"], output)
    _print_routes(report["routes"], output)
    print_cells(report["cells"], output)
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


def _print_verdict(found: dict[str, Any], output: CommandOutput) -> None:
    output.text(found["sentence"])
    for problem in found["problems"][1:]:
        output.text(f"  {problem['severity']}: {problem['text']}; {problem['remedy']}")
    output.text()


def _print_routes(routes: Sequence[dict[str, Any]], output: CommandOutput) -> None:
    for i, each in enumerate(routes):
        text = f"route {each['route']}: {', '.join(each['arms'])}"
        if each["fallbacks"]:
            text += f", else {', '.join(each['fallbacks'])}"
        if (rollout := each.get("rollout")) is not None:
            share = f"{100 * rollout['share']:g} %"
            text += f"; the canary {rollout['canary']} is {rollout['phase']}, with {share} of requests"
        output.text(("" if i else "\n") + text)


def _print_workers(workers: Sequence[dict[str, Any]], output: CommandOutput) -> None:
    if workers:
        head = ("WORKER", "POOL", "STATE", "IN FLIGHT", "RUNNING", "WAITING", "KV USED", "TIERS", "REASON")
        output.text("\n" + table(*with_places(head, [worker_row(worker) for worker in workers], workers)))


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
