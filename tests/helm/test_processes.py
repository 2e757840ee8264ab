"""The rendered chart, run as processes, with this test in place of Kubernetes' controllers, the kubelet and
KubeRay, until the chart's own test has streamed a completion.

Engines are simulated; router, control process, Ray, Redis, certificates and discovery are the real ones.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.helm.kubelet import ACCOUNT, SECRETS, Kubelet, decoded, ray_command
from tests.helm.rendering import CHART, NAMESPACE, Object, Pod, Release, render, values
from tests.kit.cluster.api_server import ApiServer, api_server
from tests.kit.cluster.slices import Pod as Listed
from tests.kit.cluster.slices import slice_of_service
from tests.kit.gateway.api_requests import Rule
from tests.kit.processes import free_port
from tests.kit.programs import program

pytestmark = [
    pytest.mark.slow,
]

SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
ROUTER, HEAD, WORKERS = "127.0.0.1", "127.0.0.61", {"prefill": "127.0.0.62", "decode": "127.0.0.63"}
SERVING = health_pb2.HealthCheckResponse.SERVING
PATIENCE_S = 120.0
SESSION, HEALTH = 7861, 7862


def simulated(gateway: int) -> Object:
    """The try-out, with engines that need no weights, at ports that are free here."""
    engine = {"kind": "sim"}
    config = {
        "gateway": {"port": gateway, "drain_timeout_s": 5},
        "worker": {"port": SESSION, "health_port": HEALTH, "drain_s": 3},
        # Its default, said so that it is told as it is here.
        "discovery": {"kubernetes": {"credentials_dir": ACCOUNT}},
        "pools": [
            {"name": "prefill", "role": "prefill", "engine": engine},
            {"name": "decode", "role": "decode", "engine": engine},
        ],
    }
    return values(CHART / "examples" / "cpu-try-out.yaml") | {"config": config}


def one(release: Release, component: str, pool: str = "") -> Pod:
    """The first pod of a component, or of a pool."""
    found = [pod for pod in release.pods() if pod.component == component]
    return next(pod for pod in found if not pool or pod.labels["kvasir.dev/pool"] == pool)


def give_rights(server: ApiServer, release: Release) -> Callable[[Path, str], object]:
    """Let service accounts do what the chart's Roles allow; gives what fills the folder of one."""
    server.tokens.clear()
    for account in release.of_kind("ServiceAccount"):
        name = account["metadata"]["name"]
        user = f"system:serviceaccount:{NAMESPACE}:{name}"
        server.tokens[f"token-of-{name}"] = user
        server.rules[user] = ()
    for binding in release.of_kind("RoleBinding"):
        rules = Rule.of_role(release.one("Role", binding["roleRef"]["name"]))
        for subject in binding["subjects"]:
            server.rules[f"system:serviceaccount:{NAMESPACE}:{subject['name']}"] = rules
    return lambda folder, name: server.write_credentials(folder, f"token-of-{name}", NAMESPACE)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Kubelet, ApiServer, int]]:
    """A cluster to which the chart has been applied, where nothing runs yet; and the gateway's port."""
    gateway, redis = free_port(), free_port()
    release = render(simulated(gateway))
    names = {
        "llm-kvasir-redis:6379": f"127.0.0.1:{redis}",
        "port 6379": f"port {redis}",
        f"llm-kvasir-router.{NAMESPACE}.svc:80": f"127.0.0.1:{gateway}",
        "redis-cli": f"redis-cli -p {redis}",
    }
    async with api_server(folder) as server:
        account = give_rights(server, release)
        for secret in release.of_kind("Secret"):
            server.put(SECRETS, secret)
        kubelet = Kubelet(
            folder / "pods",
            release,
            names,
            lambda name: decoded(server._objects[SECRETS, name]),
            account,
            server.environment(),
        )
        kubelet.folder.mkdir()
        try:
            yield kubelet, server, gateway
        finally:
            await kubelet.close()


async def until(condition: Callable[[], bool], kubelet: Kubelet, what: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        ended = [name for name, process in kubelet.running.items() if process.returncode is not None]
        if ended or asyncio.get_running_loop().time() > deadline:
            tails = {name: kubelet.output(name)[-3000:] for name in kubelet.running}
            pytest.fail(f"not so: {what}; ended: {ended}\n" + "\n".join(map(str, tails.items())))
        await asyncio.sleep(0.1)


@contextmanager
def short_folder() -> Iterator[Path]:
    """Ray's Unix sockets need short paths."""
    made = Path(tempfile.mkdtemp(prefix="kh", dir="/tmp"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def serves(ip: str) -> bool:
    """What the kubelet's readiness probe of a worker finds."""
    with grpc.insecure_channel(f"{ip}:{HEALTH}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return bool(answer.status == SERVING)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def start_ray(kubelet: Kubelet) -> None:
    """KubeRay's part: the head, and a pod for each pool."""
    (cluster,) = kubelet.release.of_kind("RayCluster")
    spec, port = cluster["spec"], free_port()
    options = {"min-worker-port": "0", "max-worker-port": "0"}
    head = ray_command(
        HEAD,
        spec["headGroupSpec"]["rayStartParams"],
        port=str(port),
        **options,
        **{"ray-client-server-port": str(free_port())},
    )
    await kubelet.start(
        one(kubelet.release, "head"),
        "head",
        HEAD,
        KUBERAY_GEN_RAY_START_CMD=head,
        RAY_REDIS_ADDRESS=spec["gcsFaultToleranceOptions"]["redisAddress"],
        RAY_external_storage_namespace="uid",
    )
    await until(lambda: '"event": "ray"' in kubelet.output("head"), kubelet, "Ray's head runs")
    for group in spec["workerGroupSpecs"]:
        pool = group["groupName"]
        command = ray_command(WORKERS[pool], group["rayStartParams"], head=f"{HEAD}:{port}", **options)
        pod = one(kubelet.release, "worker", pool)
        await kubelet.start(pod, pool, WORKERS[pool], KUBERAY_GEN_RAY_START_CMD=command)
        await until(lambda pool=pool: serves(WORKERS[pool]), kubelet, f"the pod of {pool} is ready")  # type: ignore[misc]


def list_workers(kubelet: Kubelet, server: ApiServer) -> None:
    """The EndpointSlice controller's part."""
    for service in kubelet.release.of_kind("Service"):
        pool = service["metadata"]["labels"].get("kvasir.dev/pool")
        if pool is not None:
            pod = one(kubelet.release, "worker", pool)
            ports = {each["name"]: each["containerPort"] for each in pod.spec["containers"][0]["ports"]}
            listed = Listed(f"{pool}-0", WORKERS[pool], labels=pod.labels, ports=ports)
            server.put(SLICES, slice_of_service(service, [listed]))


async def test_what_the_chart_renders_streams_a_completion() -> None:
    program("redis-server")
    with short_folder() as folder:
        async with cluster(folder) as (kubelet, server, gateway):
            release = kubelet.release
            await kubelet.run(one(release, "certify"), "certify", ROUTER)
            held = decoded(server._objects[SECRETS, "llm-kvasir-tls"])
            assert set(held) == {"ca.pem", "router.pem", "worker-prefill.pem", "worker-decode.pem"}
            await kubelet.start(one(release, "redis"), "redis", ROUTER)
            await start_ray(kubelet)
            await kubelet.start(one(release, "router"), "router", ROUTER)
            live, ready = (f"http://127.0.0.1:{gateway}/health/{each}" for each in ("live", "ready"))
            await until(lambda: answers(live), kubelet, "the router lives")
            assert not answers(ready)
            list_workers(kubelet, server)
            await until(lambda: answers(ready), kubelet, "the router is ready")
            told = await kubelet.run(one(release, "test"), "test", ROUTER)
            assert "a completion was streamed" in told

            router = {each.verb for each in server.asked if each.user.endswith("llm-kvasir-router")}
            assert router == {"list", "watch"}
            assert {each.verb for each in server.asked if each.user.endswith("-certify")} == {"get", "patch"}
            assert not {each.user for each in server.asked if each.user.endswith(("-head", "-worker"))}

            for name in ("router", "decode", "prefill", "head"):
                assert await kubelet.end(name) == 0, kubelet.output(name)


def test_the_redis_password_stands_in_no_process_arguments() -> None:
    """The chart's shell script writes it into a file; see also the policies."""
    (made,) = render().of_kind("StatefulSet")
    (container,) = made["spec"]["template"]["spec"]["containers"]
    script = container["command"][-1]
    assert "requirepass" in script
    assert "--requirepass" not in script
    assert yaml.safe_dump(container).count("password.conf") == 2
