"""Helm's own engine installs a release, upgrades it, rolls it back and uninstalls it, on an API server that
is this test's; the Job of its hook runs as a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
from tests.helm.kubelet import Kubelet
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Object, Release, render
from tests.helm.test_processes import give_rights, one
from tests.kit.cluster.api_server import api_server
from tests.kit.cluster.discovery import DiscoverableServer, kubeconfig

NAME = "llm-kvasir"
ADMIN = "token-of-the-admin"
VALUES: Object = {"redis": {"ray": False}}
BROKEN: Object = {**VALUES, "poolDefaults": {"image": {"tag": "never-built"}}}


@dataclass(slots=True)
class Installed:
    """A cluster, and Helm as a person runs it."""

    server: DiscoverableServer
    config: helm_python.Config
    folder: Path

    async def helm(self, verb: str, *arguments: Any) -> Any:
        """Run one command of Helm."""
        return await asyncio.to_thread(getattr(self.config, verb), *arguments)

    def one(self, kind: str, name: str) -> Object:
        (found,) = (each for each in self.server.of_kind(kind) if each["metadata"]["name"] == name)
        return found

    def desired(self) -> tuple[str, Object]:
        """What the control process reads of the desired pods: the revision, and the template of each pool."""
        data = self.one("ConfigMap", f"{NAME}-config")["data"]
        return data["revision"], {
            pool: each["template"] for pool, each in json.loads(data["pods.json"]).items()
        }

    def keys(self) -> Object:
        """The generated keys of the release."""
        return {each["metadata"]["name"]: each.get("data") for each in self.server.of_kind("Secret")}

    def groups(self) -> list[Object]:
        found: list[Object] = self.one("RayCluster", NAME)["spec"]["workerGroupSpecs"]
        return found


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Installed]:
    release = render(VALUES)
    server = DiscoverableServer.of(release.objects)
    async with api_server(folder, made=server):
        server.tokens[ADMIN] = "admin"
        with helm_python.Config(
            kubeconfig_content=kubeconfig(server, ADMIN), namespace=NAMESPACE, storage_driver="memory"
        ) as config:
            yield Installed(server, config, folder)


async def test_a_rollback_restores_the_former_files_with_the_former_number(tmp_path: Path) -> None:
    """What the control process must not take for an older state of the release than that of the pods."""
    async with cluster(tmp_path) as installed:
        await installed.helm("install", str(CHART), RELEASE, VALUES)
        before, groups = installed.desired(), installed.groups()
        keys = installed.keys()
        assert before[0] == "1"
        await installed.helm("upgrade", str(CHART), RELEASE, BROKEN)
        assert installed.desired()[0] == "2"
        assert installed.desired()[1] != before[1]
        assert all("never-built" in json.dumps(each) for each in installed.groups())
        await installed.helm("rollback", RELEASE)
        assert installed.desired() == before
        assert installed.groups() == groups
        assert installed.keys() == keys
        history = await installed.helm("history", RELEASE)
        assert [(each["revision"], each["status"]) for each in history] == [
            (1, "superseded"),
            (2, "superseded"),
            (3, "deployed"),
        ]


async def test_an_uninstallation_waits_for_its_job_and_leaves_nothing_but_keys(tmp_path: Path) -> None:
    async with cluster(tmp_path) as installed:
        server = installed.server
        await installed.helm("install", str(CHART), RELEASE, VALUES)
        ended = asyncio.ensure_future(run_the_job(installed, render(VALUES)))
        await installed.helm("uninstall", RELEASE)
        assert "the RayCluster is gone" in await ended
        left = {(each["kind"], each["metadata"]["name"]) for each in server._objects.values()}
        assert {kind for kind, _ in left} == {"Secret"}
        # The RayCluster, and only then what its pods run with.
        own = [each for each in server.asked if each.verb == "delete" and each.name != f"{NAME}-uninstall"]
        assert own[0].resource == "rayclusters"
        assert {"serviceaccounts", "statefulsets", "deployments"} <= {each.resource for each in own[1:]}


async def run_the_job(installed: Installed, release: Release) -> str:
    """As the kubelet and the Job's controller: run the hook's Job, and say that it is complete."""
    server, name = installed.server, f"{NAME}-uninstall"
    await server.until(lambda: any(each["metadata"]["name"] == name for each in server.of_kind("Job")))
    fill = give_rights(server, release)
    server.tokens[ADMIN] = "admin"
    kubelet = Kubelet(installed.folder / "pods", release, {}, lambda _name: {}, fill, server.environment())
    try:
        said = await kubelet.run(one(release, "uninstall"), "uninstall", "127.0.0.1")
    finally:
        await kubelet.close()
    job = installed.one("Job", name)
    done = {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}
    server.put(server.collection(job), {**job, "status": done})
    return said
