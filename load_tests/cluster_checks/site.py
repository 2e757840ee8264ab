"""A release on a live cluster, as kubectl and helm show it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvasir.config.load.loader import loads
from kvasir.config.spec.deployment import Deployment
from load_tests.cluster_checks.findings import CheckError, Finding, at_most, equal, shown
from load_tests.cluster_checks.tools import CommandError, Tools

IN_POD = Path(__file__).parent / "in_pod"
STEP_S = 1.0
LONGEST_GAP_S = 3.0
"""The promise of docs/FAILURES.md for a lost worker."""
ENGINES = ("ray::ServeReplica", "VLLM::EngineCore")
"""How the processes of an engine are named."""
INSTANCE, COMPONENT, POOL = "app.kubernetes.io/instance", "app.kubernetes.io/component", "kvasir.dev/pool"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. `waiting` is why a container of it does not start."""

    name: str
    uid: str
    node: str
    ip: str
    pool: str
    template: str
    ready: bool
    ending: bool
    waiting: str = ""
    persistent: bool = False

    @classmethod
    def of(cls, value: dict[str, Any]) -> Pod:
        """A pod of what `kubectl get pods -o json` shows of it."""
        meta, spec, status = value["metadata"], value["spec"], value.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
        # Init containers are first to pull the image; until they end, the others wait for them.
        kinds = ("initContainerStatuses", "containerStatuses")
        states = [each.get("state", {}) for kind in kinds for each in status.get(kind, [])]
        waiting = [each["waiting"].get("reason", "") for each in states if "waiting" in each]
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            node=spec.get("nodeName", ""),
            ip=status.get("podIP", ""),
            pool=meta.get("labels", {}).get(POOL, ""),
            template=meta.get("annotations", {}).get("kvasir.dev/template", ""),
            ready=conditions.get("Ready") == "True",
            ending="deletionTimestamp" in meta,
            waiting=waiting[0] if waiting else "",
            persistent=any("persistentVolumeClaim" in each for each in spec.get("volumes", [])),
        )


@dataclass
class Load:
    """Streams that run through one router, and what they noticed once they have ended."""

    noticed: dict[str, Any] = field(default_factory=dict)

    def findings(self, *, exact: bool = False, waits: bool = False) -> Iterator[Finding]:
        """`exact`: the text of every stream must be that of one that ran alone. `waits`: requests may be
        refused with the time after which to ask again."""
        said = self.noticed
        lost = said["failed"] + said["refused_without_wait"] + (0 if waits else said["refused_with_wait"])
        why = f"; the first: {said['errors'][0]}" if lost and said["errors"] else ""
        yield Finding(f"failed requests, of {said['streams'] + lost}", f"{lost}{why}", "0", lost == 0)
        if waits:
            yield shown("requests refused with Retry-After", said["refused_with_wait"])
        yield at_most("longest gap of a stream", said["longest_gap_s"], LONGEST_GAP_S, "s")
        if exact:
            yield equal("streams with another text", said["other_texts"], 0)


@dataclass
class Site:
    """The release `release` in `namespace`. Raises CheckError where the cluster does not answer as it
    should."""

    tools: Tools
    namespace: str
    release: str
    chart: str = "helm/kvasir"
    streams: int = 2
    tokens: int = 100
    exact: bool = False
    times: int = 10
    image: str = "busybox:1.36"

    def kubectl(self, *arguments: str, given: str = "", timeout_s: float = 120.0) -> str:
        return self.tools.run(["kubectl", "-n", self.namespace, *arguments], given, timeout_s)

    def helm(self, *arguments: str, given: str = "", timeout_s: float = 600.0) -> str:
        return self.tools.run(["helm", "-n", self.namespace, *arguments], given, timeout_s)

    def changes(self, *arguments: str, given: str = "") -> str:
        """`helm upgrade` and `helm rollback`. Ray's autoscaler has changed the RayCluster, which Helm 4 takes
        for a conflict."""
        forced = self.tools.run(["helm", "version", "--template", "{{.Version}}"]).startswith("v4")
        return self.helm(*arguments, *(["--force-conflicts"] if forced else []), given=given)

    @cached_property
    def cluster(self) -> dict[str, Any]:
        """The RayCluster, as it was at the first look."""
        return self.ray_cluster()

    def ray_cluster(self) -> dict[str, Any]:
        found = json.loads(
            self.kubectl("get", "raycluster", "-l", f"{INSTANCE}={self.release}", "-o", "json")
        )
        if len(found["items"]) != 1:
            raise CheckError(f"{len(found['items'])} RayClusters of the release {self.release}, not one")
        made: dict[str, Any] = found["items"][0]
        return made

    @property
    def name(self) -> str:
        """What names of the release's objects begin with."""
        return str(self.cluster["metadata"]["name"])

    @cached_property
    def spec(self) -> Deployment:
        """The deployment spec that processes read."""
        key = r"jsonpath={.data.kvasir\.yaml}"
        return loads(self.kubectl("get", "configmap", f"{self.name}-config", "-o", key), "kvasir.yaml")

    def pool_of(self, *roles: str) -> str:
        """The first pool of these roles."""
        for pool in self.spec.pools:
            if pool.role in roles:
                return pool.name
        raise CheckError(f"no pool has the role {' or '.join(roles)}")

    def pods(self, component: str, pool: str = "") -> list[Pod]:
        """The pods of a component, without those that have ended or are ending."""
        selector = f"{INSTANCE}={self.release},{COMPONENT}={component}" + (f",{POOL}={pool}" if pool else "")
        found = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        living = [
            each for each in found if each.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        ]
        return [pod for pod in map(Pod.of, living) if not pod.ending]

    def workers(self, pool: str = "") -> list[Pod]:
        return self.pods("worker", pool)

    def head(self) -> Pod:
        heads = self.pods("head")
        if not heads:
            raise CheckError("there is no pod of the head")
        return heads[-1]

    def router(self) -> Pod:
        """A router that is ready."""
        for pod in self.pods("router"):
            if pod.ready:
                return pod
        raise CheckError("no router is ready")

    def processes(self, pod: Pod) -> list[dict[str, Any]]:
        """The processes of a worker's pod."""
        code = (IN_POD / "processes.py").read_text(encoding="utf-8")
        found: list[dict[str, Any]] = json.loads(
            self.kubectl("exec", pod.name, "-c", "worker", "--", "python", "-c", code)
        )
        return found

    def engines(self) -> frozenset[tuple[str, int, int]]:
        """The processes of all engines: their pod's UID, their id, and when they started."""
        return frozenset(
            (pod.uid, each["pid"], each["started"])
            for pod in self.workers()
            for each in self.processes(pod)
            if each["name"].startswith(ENGINES)
        )

    def pool_states(self) -> list[dict[str, Any]]:
        """What the control process says of its pools; empty while it does not answer."""
        asked = ("exec", self.head().name, "-c", "control", "--", "kvasir", "status", "-o", "json")
        try:
            printed = self.kubectl(*asked)
        except CommandError as error:
            # A pool that lacks replicas is told by the status as well.
            printed = error.output
        with suppress(json.JSONDecodeError):
            found: list[dict[str, Any]] = json.loads(printed)
            return found
        return []

    def serves(self) -> bool:
        """Whether the head and all workers are ready, and every pool has its replicas."""
        pools = self.pool_states()
        ready = all(each["state"] == "RUNNING" and each["running"] == each["wanted"] for each in pools)
        return bool(pools) and ready and self.head().ready and all(pod.ready for pod in self.workers())

    def until(self, what: str, condition: Callable[[], bool], within_s: float) -> float:
        """Wait; give the seconds that it took. Raises CheckError."""
        began = self.tools.now()
        while True:
            # Pods may be gone between two commands.
            with suppress(CheckError):
                if condition():
                    return self.tools.now() - began
            if self.tools.now() - began > within_s:
                raise CheckError(f"not within {within_s:.0f} s: {what}")
            self.tools.pause(STEP_S)

    def key(self) -> str:
        """The operator's API key."""
        asked = ("get", "secret", f"{self.name}-operator-key", "-o", "jsonpath={.data.api-key}")
        return base64.b64decode(self.kubectl(*asked)).decode().strip()

    @contextmanager
    def load(self, streams: int | None = None, router: Pod | None = None) -> Iterator[Load]:
        """Run streams in a router's pod while the context runs."""
        router = router or self.router()
        code = (IN_POD / "streams.py").read_text(encoding="utf-8")
        settings = {
            "host": "127.0.0.1",
            "port": self.spec.gateway.port,
            "key": self.key(),
            "model": self.spec.model.name,
            "streams": self.streams if streams is None else streams,
            "tokens": self.tokens,
        }
        command = self._in(router, "router", "python", "-c", code)
        running = self.tools.start(command, json.dumps(settings))
        load = Load()
        try:
            if running.line() != "ready":
                raise CheckError(f"no stream could be run: {running.finish()[-300:]}")
            yield load
            load.noticed = json.loads(running.finish())
        finally:
            running.kill()

    def _in(self, pod: Pod, container: str, *command: str) -> Sequence[str]:
        return ["kubectl", "-n", self.namespace, "exec", "-i", pod.name, "-c", container, "--", *command]
