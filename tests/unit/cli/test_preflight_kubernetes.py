"""`kvasir check` in a router's pod finds why workers are unreachable, with remedies."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit.cluster.api_server import SLICES, ApiServer, Fault, api_server
from tests.kit.cluster.api_wire import certificate_for
from tests.kit.cluster.slices import Pod, endpoint_slice
from tests.kit.gateway.api_requests import Rule

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.kubernetes import (
    KubernetesProbe,
    kubernetes_findings,
    probe_kubernetes,
)
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts, ModelProbe

LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
ACCOUNT = "system:serviceaccount:default:router"


def token_of(account: str) -> str:
    payload = base64.urlsafe_b64encode(json.dumps({"sub": account}).encode()).rstrip(b"=").decode()
    return f"header.{payload}.signature"


class RouterPod:
    """A router's pod, whose API server the test may change before `found`."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        server.most_watch_s = 0.05  # that a watch may be opened is all that is tried
        self.account = folder / "account"
        server.tokens = {token_of(ACCOUNT): ACCOUNT}
        server.write_credentials(self.account, token_of(ACCOUNT))
        self.deployment = load(
            None,
            [
                f"discovery={{kind: kubernetes, kubernetes: {{credentials_dir: {self.account}}}}}",
                "worker.host=0.0.0.0",
            ],
        )

    async def probe(self) -> KubernetesProbe:
        probe = await asyncio.to_thread(probe_kubernetes, self.deployment, self.server.environment())
        assert probe is not None
        return probe

    async def found(self) -> list[Finding]:
        return list(kubernetes_findings(self.deployment, await self.probe()))

    async def the_trouble(self) -> Finding:
        (finding,) = [finding for finding in await self.found() if finding.level != "ok"]
        return finding


@pytest_asyncio.fixture
async def pod(tmp_path: Path) -> AsyncIterator[RouterPod]:
    async with api_server(tmp_path) as server:
        server.put(SLICES, endpoint_slice("prefill", [Pod("p", "10.0.0.1")]))
        server.put(
            SLICES, endpoint_slice("decode", [Pod("a", "10.0.0.2"), Pod("b", "10.0.0.3", ready=False)])
        )
        yield RouterPod(server, tmp_path)


async def test_a_router_that_can_see_its_workers_has_no_trouble(pod: RouterPod) -> None:
    found = await pod.found()
    assert {finding.level for finding in found} == {"ok"}
    assert [finding.message for finding in found] == [
        "endpointslices of namespace default can be listed and watched",
        "pool prefill: 1 of 1 pods are ready (Service kvasir-prefill)",
        "pool decode: 1 of 2 pods are ready (Service kvasir-decode)",
    ]


def test_outside_a_cluster_it_says_where_to_run_it(tmp_path: Path) -> None:
    deployment = load(None, ["discovery.kind=kubernetes", "worker.host=0.0.0.0"])
    probe = probe_kubernetes(deployment, {})
    assert probe is not None
    (finding,) = kubernetes_findings(deployment, probe)
    assert finding.level == "error"
    assert "inside a cluster only" in finding.message
    assert "kubectl exec" in finding.remedy
    assert probe_kubernetes(Deployment(), {}) is None


@pytest.mark.parametrize("missing", ["token", "ca.crt", "namespace"])
async def test_a_credential_that_is_not_mounted_is_named(pod: RouterPod, missing: str) -> None:
    (pod.account / missing).unlink()
    finding = await pod.the_trouble()
    assert missing in finding.message
    assert "automountServiceAccountToken: true" in finding.remedy


@pytest.mark.parametrize("lacks", ["list", "watch"])
async def test_a_verb_that_is_not_allowed_comes_with_the_rule_that_allows_it(
    pod: RouterPod, lacks: str
) -> None:
    allowed = tuple({"list", "watch"} - {lacks})
    pod.server.rules[ACCOUNT] = (Rule(("discovery.k8s.io",), ("endpointslices",), allowed),)
    finding = await pod.the_trouble()
    assert finding.message == f"{ACCOUNT} may not {lacks} endpointslices in namespace default"
    assert (
        'the rule {apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"], verbs: ["list", "watch"]}'
    ) in finding.remedy
    assert f"bind it to {ACCOUNT}" in finding.remedy


async def test_without_any_right_both_verbs_are_told_and_nothing_is_said_of_pools(pod: RouterPod) -> None:
    pod.server.rules[ACCOUNT] = ()
    assert [finding.message.split()[3] for finding in await pod.found()] == ["list", "watch"]


async def test_a_token_that_is_not_accepted_is_told_once(pod: RouterPod) -> None:
    pod.server.tokens = {}
    finding = await pod.the_trouble()
    assert "does not accept the token" in finding.message
    assert ACCOUNT in finding.message


async def test_a_server_that_cannot_be_reached_or_verified_is_told_with_its_address(pod: RouterPod) -> None:
    ca, _ = certificate_for(pod.server.host)
    (pod.account / "ca.crt").write_bytes(ca)
    assert "certificate" in (await pod.the_trouble()).message
    pod.server.stop()
    finding = await pod.the_trouble()
    assert f"{pod.server.host}:{pod.server.port}" in finding.message
    assert "NetworkPolicies" in finding.remedy


async def test_a_server_that_is_overloaded_is_a_warning(pod: RouterPod) -> None:
    pod.server.faults.append(Fault("list", status=429))
    finding = await pod.the_trouble()
    assert finding.level == "warning"
    assert "status 429" in finding.message


async def test_a_version_that_was_forgotten_meanwhile_is_no_refusal(pod: RouterPod) -> None:
    pod.server.faults.append(Fault("watch", gone=True))
    assert {finding.level for finding in await pod.found()} == {"ok"}


async def test_a_pool_without_a_service_is_told_with_the_labels_it_needs(pod: RouterPod) -> None:
    pod.server.delete(SLICES, "kvasir-decode-ipv4")
    pod.server.put(SLICES, endpoint_slice("decode", [Pod("x", "10.0.9.9")], deployment="staging"))
    finding = await pod.the_trouble()
    assert "no Service labelled kvasir.dev/deployment: kvasir and kvasir.dev/pool: decode" in finding.message
    assert "(there are Services of staging)" in finding.message
    assert "a port named session" in finding.remedy


async def test_a_port_of_another_name_is_told_with_those_there_are(pod: RouterPod) -> None:
    pod.server.put(SLICES, endpoint_slice("decode", [Pod("a", "10.0.0.2")], port_name="grpc"))
    finding = await pod.the_trouble()
    assert finding.message == "pool decode: Service kvasir-decode has no port named session; it has: grpc"


async def test_a_pool_whose_pods_are_not_ready_names_them(pod: RouterPod) -> None:
    pod.server.put(SLICES, endpoint_slice("decode", [Pod("d-0", "10.0.0.2", ready=False)]))
    finding = await pod.the_trouble()
    assert (finding.level, finding.message) == ("warning", "pool decode: none of 1 pods is ready: d-0")
    assert "kubectl describe pod d-0" in finding.remedy


async def test_a_service_that_selects_no_pod_is_told_unless_there_should_be_none(pod: RouterPod) -> None:
    pod.server.put(SLICES, endpoint_slice("decode", [Pod("d", "10.0.0.2", terminating=True)]))
    finding = await pod.the_trouble()
    assert finding.message == (
        "pool decode: Service kvasir-decode selects no pod but 1 that are being deleted"
    )
    pod.server.put(SLICES, {**endpoint_slice("decode", []), "ports": None})
    assert "selects no pod" in (await pod.the_trouble()).message
    pools = [pool.model_copy(update={"replicas": 0}) for pool in pod.deployment.pools]
    pod.deployment = pod.deployment.model_copy(update={"pools": tuple(pools)})
    assert {finding.level for finding in await pod.found()} == {"ok"}


async def test_services_of_pools_that_the_spec_has_not_are_told(pod: RouterPod) -> None:
    pod.server.put(SLICES, endpoint_slice("retired", []))
    assert (
        "labelled for pools that this deployment does not have: retired" in (await pod.the_trouble()).message
    )


async def test_workers_that_listen_on_loopback_are_an_error(pod: RouterPod) -> None:
    pod.deployment = pod.deployment.model_copy(
        update={"worker": pod.deployment.worker.model_copy(update={"host": "127.0.0.1"})}
    )
    assert "can be reached from their own pods only" in (await pod.the_trouble()).message


async def test_a_pod_of_the_router_is_not_asked_for_what_engines_need(pod: RouterPod) -> None:
    bare = MachineFacts(
        system="linux",
        cpus=0.1,
        memory_available=1,
        memory_limit="this container's limit",
        shm_free=None,
        shm_writable=False,
        open_files=20_000,
        model=ModelProbe(
            folder="/m",
            weights_problem="/m has no safetensors files",
            config=ModelConfig(Path("/m"), LLAMA, LLAMA),
            files=frozenset({"tokenizer.json"}),
        ),
        kubernetes=await pod.probe(),
    )
    assert {finding.level for finding in examine(pod.deployment, bare)} == {"ok"}
    without = replace(bare, model=replace(bare.model, files=frozenset()))
    (trouble,) = [finding for finding in examine(pod.deployment, without) if finding.level != "ok"]
    assert trouble.message == "/m has no tokenizer: Kvasir reads tokenizer.json only"
