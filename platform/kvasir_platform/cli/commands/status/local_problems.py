"""What is wrong with a deployment on this machine that its router does not know: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir_platform.cluster.local.launcher import ReplicaStatus
from kvasir_platform.cluster.local.runtime_dir import DeploymentState
from kvasir_platform.gateway.openai.schema.operation import StatusProblem, StatusVerdict
from kvasir_platform.gateway.operator.verdict import verdict

_SEEN = "pool_short"


@dataclass(frozen=True, slots=True)
class ControlFacts:
    """What a control process says: why its planner keeps the sizes of pools, "" if it does not, and the sizes
    of the pools that no planner sizes, which `kvasir scale` may have set."""

    frozen: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


def judged(
    state: DeploymentState,
    page: dict[str, Any] | None,
    problem: str,
    *,
    running: bool,
    control: ControlFacts | None = None,
) -> StatusVerdict:
    """Return the verdict on a deployment. `page` is what its gateway answers to /status, None without an
    answer, for the reason `problem`; `running`: its supervisor lives."""
    control = ControlFacts() if control is None else control
    if not running:
        text = f"the supervisor of {state.name} was killed, and parts of it may still run"
        found = [
            StatusProblem("down", "crashed", state.name, text, "clean up: `kvasir down`, then `kvasir up`")
        ]
        return verdict(found, "")
    if not state.address:
        text = f"{state.name} has no gateway yet: it is {state.phase}"
        remedy = f"wait; its logs are in {state.logs}"
        return verdict([StatusProblem("down", "starting", state.name, text, remedy)], "")
    if page is None:
        remedy = "read the router's log: `kvasir logs router`"
        return verdict([StatusProblem("down", "no_answer", "router", problem, remedy)], "")
    known = page.get("verdict") or {"ok": True, "sentence": "All is well.", "problems": []}
    scaled = _scaled(page, control.sizes)
    problems = [
        StatusProblem(**each)
        for each in known["problems"]
        if each["code"] != _SEEN or each["subject"] not in scaled
    ]
    found = [*problems, *_replicas(state.replicas), *_frozen(control.frozen)]
    return verdict(found, _well(known, page))


def _well(known: dict[str, Any], page: dict[str, Any]) -> str:
    """Return the gateway's sentence if all is well, also where it named only what does not count here."""
    if known["ok"]:
        return str(known["sentence"])
    count = len(page["workers"])
    return f"All is well: {count} {'worker serves' if count == 1 else 'workers serve'}."


def _scaled(page: dict[str, Any], sizes: Mapping[str, int]) -> set[str]:
    """Return the pools that have the size to which `kvasir scale` set them, whatever their spec says."""
    serving = {each["pool"]: each["serving"] for each in page.get("pools", ())}
    return {pool for pool, size in sizes.items() if serving.get(pool, 0) >= size}


def _replicas(replicas: Sequence[ReplicaStatus]) -> Iterator[StatusProblem]:
    for each in replicas:
        if each.state == "failed":
            text = f"replica {each.replica_id} did not start: {each.detail}"
            remedy = each.remedy or f"read its log: `kvasir logs {each.pool}`"
            yield StatusProblem("degraded", "replica_failed", each.replica_id, text, remedy)


def _frozen(why: str) -> Iterator[StatusProblem]:
    if why:
        text, remedy = f"pool sizes are kept: {why}", "see what they would be: `kvasir explain scaling`"
        yield StatusProblem("warning", "planner_frozen", "planner", text, remedy)


def pool_problems(pools: Sequence[dict[str, Any]]) -> Iterator[StatusProblem]:
    """Yield what is wrong with the pools of a control process, as it answers to the command `status`."""
    for each in pools:
        if each["running"] < each["wanted"]:
            detail = f" ({each['detail']})" if each["detail"] else ""
            text = f"{each['running']} of {each['wanted']} replicas of pool {each['pool']} run{detail}"
            remedy = "see why in the log of the pod of a replica: `kubectl logs POD -c worker`"
            yield StatusProblem(
                "warning" if each["running"] else "degraded", "pool_short", each["pool"], text, remedy
            )
