"""Redis over TLS as the chart sets it up: the rendered pod of a real redis-server with certificates of this
test, and each of our processes' clients of it, with the rendered spec."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from tests.helm.kubelet import Kubelet
from tests.helm.rendering import Release, render, spec_text
from tests.kit.engines.tier_blocks import LIMITS, PRINT, SIZE, get, put
from tests.kit.lab.redis_server import RedisServer
from tests.kit.processes import free_port
from tests.kit.programs import program

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import loads
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.redis import LimitsRedisSpec, RedisServerSpec
from kvasir.config.spec.tiers import RedisTierSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.cluster.kubernetes.head_state import delete_head_state
from kvasir_platform.gateway.tenants.redis_limits import RedisLimits
from kvasir_workers.tiers.blobs.redis_tier import RedisTier

PASSWORD = "word"
PATIENCE_S = 20.0
RAYS_CLIENT = """
import sys
from ray._private.gcs_utils import cleanup_redis_storage
cleanup_redis_storage("localhost", int(sys.argv[1]), "", True, "uid")
"""
EXTERNAL = {"bundled": False, "url": "rediss://redis.example.com:6380", "caSecret": "authority"}


@dataclass
class Served:
    """The bundled Redis of a release, and what its clients are told."""

    release: Release
    deployment: Deployment
    folder: Path
    address: str

    def told(self, spec: LimitsRedisSpec | RedisTierSpec, ca: str = "ours") -> dict[str, object]:
        """A client's part of the spec, with addresses and files as they are here."""
        given = spec.model_dump()
        given["url"] = spec.url.replace("llm-kvasir-redis:6379", self.address)
        given["password_file"] = str(self.folder / "password")
        given["ca_file"] = str(self.folder / f"{ca}.pem")
        return given


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    program("redis-server")
    release = render({"redis": {"tlsSecret": "redis-tls", "tier": True, "persistence": {"enabled": False}}})
    files = authorities(tmp_path, "localhost")
    pair = files["server"].read_bytes()
    secrets = {
        "redis-tls": {"tls.crt": pair, "tls.key": pair, "ca.crt": files["ours"].read_bytes()},
        "llm-kvasir-redis": {"password": PASSWORD.encode()},
    }
    (tmp_path / "password").write_text(PASSWORD, encoding="ascii")
    port = free_port()
    kubelet = Kubelet(
        tmp_path / "pods",
        release,
        {"port 6379": f"port {port}", "bind * -::*": "bind 127.0.0.1"},
        lambda name: secrets[name],
        lambda *_: None,
        {},
    )
    kubelet.folder.mkdir()
    (pod,) = (pod for pod in release.pods() if pod.component == "redis")
    try:
        await kubelet.start(pod, "redis", "127.0.0.1")
        async with asyncio.timeout(PATIENCE_S):
            while not listens(port):
                assert kubelet.running["redis"].returncode is None, kubelet.output("redis")
                await asyncio.sleep(0.01)
        yield Served(release, loads(spec_text(release), "kvasir.yaml"), tmp_path, f"localhost:{port}")
    finally:
        await kubelet.close()


def authorities(folder: Path, name: str) -> dict[str, Path]:
    """Files of two authorities, and of a certificate and its key that the first made for a host's name."""
    day, now = 86_400.0, time.time()
    ours, theirs = (Authority.make(each, now - day, now + day) for each in ("ours", "theirs"))
    server = ours.certify("spiffe://redis", name, now - day, now + day)
    files = {each: folder / f"{each}.pem" for each in ("ours", "theirs", "server")}
    for each, data in (("ours", ours.pem), ("theirs", theirs.pem), ("server", server)):
        files[each].write_bytes(data)
    return files


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_limits_and_the_tier_use_the_bundled_redis_over_tls_and_trust_its_authority_alone(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    limits, tier = served.deployment.tenancy.redis, served.deployment.tiers.redis
    assert limits is not None
    assert tier is not None
    assert limits.url == "rediss://llm-kvasir-redis:6379/1"
    assert limits.ca_file == tier.ca_file == "/etc/kvasir/redis-ca/ca.crt"
    assert await shares(served.told(limits), caplog)
    assert stores(served.told(tier))
    for given in (limits, tier):
        assert given.url.startswith("rediss:")
    assert not await shares(served.told(limits, "theirs"), caplog)
    assert not stores(served.told(tier, "theirs"))
    assert not await shares(plain(served.told(limits)), caplog)
    assert not stores(plain(served.told(tier)))
    assert await deleted(served, "ours") == "nothing"
    assert "certificate verify failed" in await deleted(served, "theirs")


def plain(given: dict[str, object]) -> dict[str, object]:
    """The same without TLS."""
    return {**given, "url": str(given["url"]).replace("rediss:", "redis:"), "ca_file": None}


async def shares(given: dict[str, object], caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a router's limits reach the server."""
    caplog.clear()
    spec = LimitsRedisSpec.model_validate({**given, "timeout_s": 5.0})
    limits = RedisLimits(spec, MonotonicClock(), "router")
    running = asyncio.create_task(limits.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not limits.shared and "Redis is unavailable" not in caplog.text:
                await asyncio.sleep(0.001)
        return limits.shared
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def deleted(served: Served, ca: str) -> str:
    """What the Job that uninstalls the release finds of Ray's head, or why it cannot look."""
    server = RedisServerSpec(
        url=f"rediss://{served.address}",
        password_file=str(served.folder / "password"),
        ca_file=str(served.folder / f"{ca}.pem"),
    )
    try:
        return "nothing" if await delete_head_state(server, "uid", PATIENCE_S) == 0 else "something"
    except ConfigError as error:
        return error.message


def stores(given: dict[str, object]) -> bool:
    """Whether a worker's tier holds what it wrote."""
    spec = RedisTierSpec.model_validate({**given, "lookup_timeout_s": 0.5, "timeout_s": 1.0})
    tier = RedisTier(spec, PRINT, SIZE, rng=Random(1), limits=LIMITS)
    try:
        put(tier, 1, 2)
        return get(tier, 1, 2) == 2
    finally:
        tier.close()


@pytest.mark.parametrize("redis", [{"tlsSecret": "authority"}, EXTERNAL], ids=["bundled", "external"])
def test_every_pod_that_uses_redis_has_its_authority_and_nobody_else_its_key(
    redis: dict[str, object],
) -> None:
    release = render({"redis": {**redis, "tier": True}})
    for pod in release.pods():
        if pod.component == "redis":
            continue
        secrets = [each for each in pod.spec["volumes"] if "secret" in each]
        volumes = [each for each in secrets if each["secret"]["secretName"] == "authority"]
        assert bool(volumes) is (pod.component in {"router", "worker", "head", "uninstall"}), pod.of
        for volume in volumes:
            assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
            mounted = [mount["mountPath"] for mount in pod.containers[-1]["volumeMounts"]]
            mounted += [mount["mountPath"] for mount in pod.spec["containers"][0]["volumeMounts"]]
            assert "/etc/kvasir/redis-ca" in mounted


@pytest.mark.parametrize("redis", [{"tlsSecret": "authority"}, EXTERNAL], ids=["bundled", "external"])
def test_ray_is_told_the_authority_of_its_redis(redis: dict[str, object]) -> None:
    (cluster,) = render({"redis": redis}).of_kind("RayCluster")
    assert cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"].startswith("rediss://")
    (control, *_) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "RAY_REDIS_CA_CERT", "value": "/etc/kvasir/redis-ca/ca.crt"} in control["env"]


def test_a_redis_with_tls_serves_nothing_else() -> None:
    release = render({"redis": {"tlsSecret": "authority"}})
    lines = release.one("ConfigMap", "llm-kvasir-redis")["data"]["redis.conf"].splitlines()
    assert "port 0" in lines
    assert "tls-port 6379" in lines
    (made,) = release.of_kind("StatefulSet")
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert "--tls --cacert" in container["readinessProbe"]["exec"]["command"][-1]


@pytest.mark.parametrize(
    ("redis", "told"),
    [
        ({**EXTERNAL, "tlsSecret": "authority"}, "certificate of the bundled Redis"),
        ({**EXTERNAL, "url": "redis://redis.example.com"}, "does not use TLS"),
        ({"caSecret": "authority"}, "does not use TLS"),
    ],
)
def test_an_authority_that_nothing_would_use_is_refused(redis: dict[str, object], told: str) -> None:
    with pytest.raises(Exception, match=told):
        render({"redis": redis})


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("ca", ["ours", "theirs"])
async def test_ray_trusts_the_authority_whatever_name_the_certificate_has(tmp_path: Path, ca: str) -> None:
    """Ray's client, which its head uses too, checks the chain of the certificate and not the host's name."""
    files = authorities(tmp_path, "elsewhere.example")
    port, pair = str(free_port()), str(files["server"])
    options = ["--tls-port", port, "--tls-cert-file", pair, "--tls-key-file", pair]
    with RedisServer(
        tmp_path, *options, "--tls-ca-cert-file", str(files["ours"]), "--tls-auth-clients", "no"
    ):
        asked = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RAYS_CLIENT,
            port,
            env={**os.environ, "RAY_REDIS_CA_CERT": str(files[ca])},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert (await asked.wait() == 0) is (ca == "ours")
