"""A cluster with one release, as kubectl and helm show it to load_tests/cluster_checks.

Kubernetes, KubeRay and the release behave as they should: a pod that is deleted is made anew from the
template of that time, and is ready some seconds later. A test switches on what goes wrong. Time passes in
`pause` only.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from load_tests.cluster_checks.tools import CommandError

READY_S = 3.0
POOLS = ("prefill", "decode")
NAME = "kvasir"
CAUSE = "invalid literal for int() with base 10: 'never'"
SPEC: dict[str, Any] = {
    "version": "kvasir/v1",
    "pools": [{"name": name, "role": name} for name in POOLS],
    "discovery": {"kind": "static", "endpoints": [f"{name}=127.0.0.1:1" for name in POOLS]},
}
QUIET = {
    "streams": 40,
    "other_texts": 0,
    "failed": 0,
    "refused_with_wait": 0,
    "refused_without_wait": 0,
    "longest_gap_s": 0.5,
    "itl_p50_ms": 4.0,
    "itl_p99_ms": 30.0,
    "errors": [],
}


@dataclass(slots=True)
class Talk:
    """A load, which has noticed `noticed` when it ends."""

    noticed: dict[str, Any]
    killed: bool = False

    def line(self) -> str:
        return "ready"

    def finish(self) -> str:
        return json.dumps(self.noticed)

    def kill(self) -> None:
        self.killed = True


@dataclass(slots=True)
class LivePod:
    """A pod that is ready from `ready_at` on. `engine` is the process id of its engine; `tag` the tag of an
    image that does not exist; `made` how many pods have been made in its place from one template."""

    name: str
    component: str
    pool: str
    template: str
    ready_at: float
    engine: int
    node: str
    tag: str = ""
    made: int = 1


@dataclass
class LiveCluster:
    """`noticed` is what streams notice. What can go wrong: engines that end with the head; a head that takes
    `head_end_s`; routers that are not ready without a decode worker; an uninstallation that takes
    `uninstall_s`; pods that are made `lives` times for one upgrade; logs without the error of an engine;
    threads that spin; a Redis without a volume; an upgrade that does not fit and is not `refused`. Each pool
    has `gpus`."""

    noticed: dict[str, Any] = field(default_factory=lambda: dict(QUIET))
    engines_end_with_head: bool = False
    head_end_s: float = 4.0
    routers_follow_workers: bool = False
    uninstall_s: float = 12.0
    lives: int = 1
    silent: bool = False
    policy: str = "PASSIVE"
    volume: bool = True
    refused: bool = True
    gpus: int = 0
    helm: str = "v3.19.0"
    time: float = 0.0
    template: str = "t0"
    tag: str = ""

    def __post_init__(self) -> None:
        self.asked: list[str] = []
        self.pods: list[LivePod] = []
        self._revisions: list[tuple[str, str]] = []
        self._failing_since: float | None = None
        self._node = "node-1"
        self._numbers = itertools.count(1)
        self._install(self.time)

    # -- the machine -----------------------------------------------------------------------------

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.time += seconds
        self._roll()

    def start(self, command: Sequence[str], first_line: str) -> Talk:
        self.asked.append(first_line)
        return Talk(self.noticed)

    def run(self, command: Sequence[str], given: str = "", timeout_s: float = 120.0) -> str:
        self.asked.append(" ".join(command))
        program, *words = command
        if words[0] == "-n":
            words = words[2:]
        return self._helm(words) if program == "helm" else self._kubectl(words)

    # -- controllers -----------------------------------------------------------------------------

    def _install(self, ready_at: float) -> None:
        for component, pool in (
            ("router", ""),
            ("head", ""),
            ("redis", ""),
            *(("worker", each) for each in POOLS),
        ):
            self._make(component, pool, ready_at)

    def _make(self, component: str, pool: str, ready_at: float, made: int = 1) -> None:
        number = next(self._numbers)
        name = f"{pool or component}-{number}"
        self.pods.append(
            LivePod(name, component, pool, self.template, ready_at, 1000 + number, self._node, self.tag, made)
        )

    def _of(self, component: str, pool: str = "") -> list[LivePod]:
        return [each for each in self.pods if each.component == component and pool in ("", each.pool)]

    def _ready(self, pod: LivePod) -> bool:
        if pod.component == "router" and self.routers_follow_workers:
            return any(map(self._ready, self._of("worker", "decode")))
        return self.time >= pod.ready_at and not pod.tag

    def _replace(self, pod: LivePod) -> None:
        self.pods.remove(pod)
        made = pod.made + 1 if pod.template == self.template else 1
        self._make(pod.component, pod.pool, self.time + READY_S, made)
        if pod.component == "head" and self.engines_end_with_head:
            for each in self._of("worker"):
                each.engine += 100
        if pod.component == "redis" and not self.volume:
            for each in self._of("worker"):
                self._replace(each)

    def _roll(self) -> None:
        """As the control process: one outdated pod at a time, while all others serve."""
        workers = self._of("worker")
        outdated = [each for each in workers if each.template != self.template]
        outdated += [each for each in workers if self._revisions and each.made < self.lives]
        if outdated and all(map(self._ready, workers)):
            self._replace(outdated[0])

    # -- helm ------------------------------------------------------------------------------------

    def _helm(self, words: Sequence[str]) -> str:
        text = " ".join(words)
        match words[0]:
            case "version":
                return self.helm
            case "get":
                return "images: {}\n"
            case "upgrade" if "gpu=T4" in text and self.refused:
                raise CommandError("UPGRADE FAILED: job kvasir-fit failed: BackoffLimitExceeded")
            case "upgrade":
                self._revisions.append((self.template, self.tag))
                marked = re.search(r"kvasir-check=(\S+)", text)
                self.template, self.tag = (f"t{marked[1]}", "") if marked else ("broken", "never-built")
            case "rollback":
                self.template, self.tag = self._revisions.pop()
            case "install" | "uninstall" if "failing" in text:
                self._failing_since = self.time if words[0] == "install" else None
            case "uninstall":
                self.pods.clear()
                self.time += self.uninstall_s
            case "install":
                self._install(self.time + READY_S)
        return ""

    # -- kubectl ---------------------------------------------------------------------------------

    def _kubectl(self, words: Sequence[str]) -> str:
        match words[0]:
            case "get":
                return self._get(words[1], " ".join(words))
            case "delete" if words[1] == "pod":
                for pod in [each for each in self.pods if each.name in words]:
                    self.time += (
                        self.head_end_s if pod.component == "head" and "--force" not in words else 0.0
                    )
                    self._replace(pod)
            case "exec":
                return self._exec(next(each for each in self.pods if each.name == words[1]), words)
            case "logs" if words[1] == f"job/{NAME}-fit":
                return "  ERROR    memory    pool prefill: tiny does not fit on T4 by 0.2 GiB\n"
            case "logs":
                return "" if self.silent else f'{{"event": "start_failed", "pool": "prefill"}} {CAUSE}\n' * 2
            case "drain":
                self._node = "node-2"
                for pod in self._of("worker"):
                    self._replace(pod)
        return ""

    def _get(self, kind: str, text: str) -> str:
        if kind == "raycluster":
            return "" if "--ignore-not-found" in text else json.dumps({"items": [self._ray_cluster()]})
        if kind == "events":
            return "" if self.silent else f"pool prefill does not start: {CAUSE}"
        if kind == "configmap":
            pools = [{**each, "gpus": self.gpus} for each in SPEC["pools"]]
            return json.dumps(SPEC | {"pools": pools})
        if kind == "secret":
            return base64.b64encode(f"key-{self.time}".encode()).decode()
        component = re.search(r"component=(\w+)", text)
        pool = re.search(r"pool=(\w+)", text)
        shown = self._of(component[1], pool[1] if pool else "") if component else self.pods
        return json.dumps({"items": [self._pod(each) for each in shown]})

    def _ray_cluster(self) -> dict[str, Any]:
        template = {"metadata": {"annotations": {"kvasir.dev/template": self.template}}}
        groups = [{"groupName": each, "template": template} for each in POOLS]
        return {
            "metadata": {"name": NAME},
            "spec": {"enableInTreeAutoscaling": True, "workerGroupSpecs": groups},
        }

    def _pod(self, pod: LivePod) -> dict[str, Any]:
        volumes: list[dict[str, Any]] = [{"secret": {"secretName": "session", "defaultMode": 0o440}}]
        if pod.component == "redis" and self.volume:
            volumes.append({"persistentVolumeClaim": {"claimName": "data"}})
        # KubeRay's init container has the image of the worker, which waits for it.
        pulled, waiting = [
            [{"state": {"waiting": {"reason": reason}}}] if pod.tag else []
            for reason in ("ImagePullBackOff", "PodInitializing")
        ]
        return {
            "metadata": {
                "name": pod.name,
                "uid": f"uid-{pod.name}",
                "labels": {"kvasir.dev/pool": pod.pool, "app.kubernetes.io/component": pod.component},
                "annotations": {"kvasir.dev/template": pod.template},
            },
            "spec": {
                "nodeName": pod.node if pod.component == "worker" else "node-0",
                "volumes": volumes,
                "containers": [{"resources": {"requests": {"cpu": "250m"}}}],
            },
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": str(self._ready(pod))}],
                "initContainerStatuses": pulled,
                "containerStatuses": waiting,
            },
        }

    def _exec(self, pod: LivePod, words: Sequence[str]) -> str:
        if "python" in words:
            threads = {"OMP_WAIT_POLICY": self.policy}
            engine = {
                "pid": pod.engine,
                "started": 7,
                "nice": 0,
                "name": "VLLM::EngineCore",
                "threads": threads,
            }
            return json.dumps([engine, engine | {"pid": 1, "name": "raylet"}])
        if "status" in words:
            return json.dumps([self._state(each) for each in POOLS])
        return "sizes of prefill and decode are set by hand\n"

    def _state(self, pool: str) -> dict[str, Any]:
        running = sum(map(self._ready, self._of("worker", pool)))
        state = {"pool": pool, "state": "RUNNING", "running": running, "wanted": 1, "detail": ""}
        if self._failing_since is not None:
            attempt = 1 + int(self.time - self._failing_since) // 10
            why = "no reason given" if self.silent else CAUSE
            state["detail"] = f"attempt {attempt} failed, the next one is at 12:00:00 UTC: {why}"
        return state
