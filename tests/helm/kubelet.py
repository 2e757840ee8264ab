"""Runs the containers of rendered pods as processes of this machine, as a kubelet would from the manifests.

A pod has an address of its own in 127.0.0.0/8 and a folder of its own. What a container mounts lies below
that folder, and every path in its command, arguments, environment and files is told as it is there. Nothing
else is changed but names that only a cluster resolves, and ports that one machine cannot have twice
(the `names`).
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.helm.rendering import NAMESPACE, ROOT, Object, Pod, Release

TOLD = "/etc/kvasir/tls"
"""Stands in the spec that the head tells its workers, so that here it is one folder for all pods."""
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
END_S = 60.0


@dataclass(slots=True)
class Kubelet:
    """`secret` gives what a Secret holds, by its name; `account` fills a service account's folder."""

    folder: Path
    release: Release
    names: Mapping[str, str]
    secret: Callable[[str], Mapping[str, bytes]]
    account: Callable[[Path, str], object]
    environment: Mapping[str, str]
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(
        self, pod: Pod, name: str, ip: str, *, container_name: str = "", **told: str
    ) -> asyncio.subprocess.Process:
        """Start a container of a pod, its first by default; `told` are variables that an operator adds to
        it."""
        named = [each for each in pod.containers if each["name"] == container_name]
        container = (named or pod.spec["containers"])[0]
        place = self._place(pod, container, self.folder / name)
        words = [*container["command"], *container.get("args", [])]
        command = [self._here(each, place) for each in words]
        if command[0] == "python":
            command[0] = sys.executable
        path = os.pathsep.join(str(ROOT / each) for each in ("platform", "router", "workers"))
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        base = {"PATH": programs, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        given = {each["name"]: self._value(each, place, ip) for each in container.get("env", [])}
        operators = {key: self._here(value, place) for key, value in told.items()}
        with self.log(name).open("wb") as log:
            self.running[name] = await asyncio.create_subprocess_exec(
                *command,
                env={**base, **self.environment, **given, **operators},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.running[name]

    async def run(self, pod: Pod, name: str, ip: str) -> str:
        """Run a pod to its end and give its output. Raises AssertionError for one that fails."""
        process = await self.start(pod, name, ip)
        status = await asyncio.wait_for(process.wait(), END_S)
        assert status == 0, self.output(name)
        del self.running[name]
        return self.output(name)

    async def end(self, name: str) -> int:
        """As Kubernetes ends a pod; the exit status."""
        process = self.running[name]
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(process.wait(), END_S)

    async def close(self) -> None:
        """Kill what still runs, with all that it has started."""
        for process in self.running.values():
            if process.returncode is not None:
                continue
            root = psutil.Process(process.pid)
            for each in [root, *root.children(recursive=True)]:
                try:
                    each.kill()
                except psutil.NoSuchProcess:
                    continue
            await process.wait()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def output(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")

    def _place(self, pod: Pod, container: Object, folder: Path) -> dict[str, Path]:
        """Where each mounted path of a container is here, with what its volume holds."""
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        place = {TOLD: self.folder / "tls"}
        numbers = {name: number for number, name in enumerate(volumes)}
        for mount in container["volumeMounts"]:
            # Short: Ray puts Unix sockets there. Containers of a pod share its volumes.
            place.setdefault(mount["mountPath"], folder / str(numbers[mount["name"]]))
        if pod.spec.get("automountServiceAccountToken"):
            place[ACCOUNT] = folder / "account"
            place[ACCOUNT].mkdir(parents=True)
            self.account(place[ACCOUNT], pod.spec["serviceAccountName"])
        for mount in container["volumeMounts"]:
            where = place[mount["mountPath"]]
            where.mkdir(parents=True, exist_ok=True)
            if "projected" in volumes[mount["name"]]:
                self.account(where, pod.spec["serviceAccountName"])
            for file, data in self._held(volumes[mount["name"]]).items():
                text = data.decode()
                (where / file).write_text(text if "PRIVATE KEY" in text else self._here(text, place))
        return place

    def _held(self, volume: Object) -> dict[str, bytes]:
        if "configMap" in volume:
            made = self.release.one("ConfigMap", volume["configMap"]["name"])
            return {key: text.encode() for key, text in made["data"].items()}
        if "secret" not in volume:
            return {}
        held = self.secret(volume["secret"]["secretName"])
        items = volume["secret"].get("items", [{"key": key, "path": key} for key in held])
        return {item["path"]: held[item["key"]] for item in items}

    def _value(self, variable: Object, place: Mapping[str, Path], ip: str) -> str:
        if "value" in variable:
            return self._here(variable["value"], place)
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if path == "spec.nodeName":
            return "node"
        # The pod has no label of its node: then the kubelet sets an empty variable.
        return "" if path.startswith("metadata.labels['") else {"status.podIP": ip}[path]

    def _here(self, text: str, place: Mapping[str, Path]) -> str:
        """The text with paths and names as they are on this machine."""
        known = {**{path: str(where) for path, where in place.items()}, **self.names}
        longest = sorted(known, key=len, reverse=True)
        paths = "|".join(re.escape(each) for each in longest)
        return re.sub(rf"(?<![\w.])(?:{paths})(?![\w-])", lambda found: known[found[0]], text)


def ray_command(pod_ip: str, params: Mapping[str, str], *, head: str | None = None, **own: str) -> str:
    """The command that KubeRay makes of `rayStartParams`; for a worker, of the head's address too. `own` are
    ports that pods on one machine cannot share."""
    told = {**params, "node-ip-address": pod_ip, **own}
    # Of one machine they would be the same port thrice.
    del told["node-manager-port"]
    words = " ".join(f"--{key}={value} " for key, value in sorted(told.items()))
    if head is None:
        return f"ray start --head --no-monitor --block {words}"
    return f"ray start --address={head} --block {words}"


def decoded(secret: Object) -> dict[str, bytes]:
    """What a Secret holds."""
    return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
