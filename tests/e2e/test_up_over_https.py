"""`kvasir up` with HTTPS and client certificates: it becomes ready, and every command reaches its gateway.

Its head's state is in Redis: Ray's head comes back under load, and the loss of Ray's node is told.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.kit.cluster.pods import steady_load, stream_text
from tests.kit.lab.invariants import invariant_violations
from tests.kit.lab.redis_server import RedisServer
from tests.kit.stack import Stack, runs_anew

from kvasir_platform.cluster.certificates import Authority

pytestmark = pytest.mark.slow
StartStack = Callable[..., AbstractContextManager[Stack]]

NAME = "api.example.com"
DAY_S = 86_400.0
TOKENS = 40
PATIENCE_S = 60.0
SPEC = """
pools:
  - {{name: prefill, role: prefill, engine: {{kind: sim}}, cpus: 0.1}}
  - {{name: decode, role: decode, engine: {{kind: sim, sim: {{decode_step_s: 0.02}}}}, cpus: 0.1}}
worker: {{drain_s: 3}}
gateway:
  edges: {edges}
  tls: {{cert_file: own.pem, key_file: own.pem, client_ca_file: clients.pem}}
ray: {{head_redis_url: "redis://{redis}"}}
"""


@dataclass(frozen=True, slots=True)
class Secured:
    """A deployment, whose certificate ends at `expires`, and a client's part of it."""

    stack: Stack
    redis: RedisServer
    context: ssl.SSLContext
    expires: float

    @property
    def url(self) -> str:
        return f"https://{self.stack.address}"

    def connect(self) -> httpx.Client:
        """A client with a certificate."""

        def named(request: httpx.Request) -> None:
            request.extensions["sni_hostname"] = NAME

        return httpx.Client(
            base_url=self.url, verify=self.context, timeout=30, event_hooks={"request": [named]}
        )

    def at_rest(self) -> bool:
        with self.connect() as client:
            return not invariant_violations(client.get("/status").json(), client.get("/metrics").text)


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.soak), 1], ids="{} edges".format)
def secured(
    request: pytest.FixtureRequest, start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    home, now = tmp_path_factory.mktemp("secured"), time.time()
    expires = now + DAY_S
    authority = Authority.make("test", now - 60.0, expires)
    for file in ("own.pem", "client.pem"):
        (home / file).write_bytes(authority.certify("spiffe://x/y", NAME, now - 60.0, expires))
    (home / "clients.pem").write_bytes(authority.pem)
    context = ssl.create_default_context(cafile=str(home / "clients.pem"))
    context.load_cert_chain(home / "client.pem")
    with pytest.MonkeyPatch.context() as patch, RedisServer(home) as redis:
        # Paths of the spec are below its folder, wherever commands are given later.
        patch.chdir(home)
        Path("kvasir.yaml").write_text(SPEC.format(edges=request.param, redis=redis.address))
        with start_stack(home, "-f", "kvasir.yaml", secure=True) as stack:
            patch.chdir("/")
            yield Secured(stack, redis, context, expires)
        assert redis.ask("DBSIZE") == ":0"


def test_with_https_for_certified_clients_up_is_ready_and_commands_work(secured: Secured) -> None:
    stack = secured.stack
    (status,) = json.loads(stack.kvasir("-o", "json", "status").stdout)
    assert (status["url"], status["problem"]) == (secured.url, "")
    workers = json.loads(stack.kvasir("-o", "json", "get", "workers").stdout)
    assert {each["pool"]: each["state"] for each in workers} == {"prefill": "ready", "decode": "ready"}
    with secured.connect() as client:
        answer = client.post(
            "/v1/completions", json={"model": "kvasir-tiny", "prompt": "hi", "max_tokens": 2}
        )
        assert answer.status_code == 200
        figures = client.get("/metrics").text
    stack.wait_until(secured.at_rest, 30.0, "rest")
    (expiry,) = [line for line in figures.splitlines() if line.startswith("kvasir_gateway_certificate_")]
    assert abs(float(expiry.split()[1]) - secured.expires) < 2.0
    explained = stack.kvasir("explain", answer.headers["x-request-id"])
    assert explained.returncode == 0, explained.stderr
    (prefill,) = [each["worker_id"] for each in workers if each["pool"] == "prefill"]
    drained = stack.kvasir("drain", prefill, "--timeout", "60")
    assert drained.returncode == 0, drained.stderr
    restarted = stack.kvasir("restart", "prefill")
    assert "prefill is restarted" in restarted.stdout


def test_with_its_state_in_redis_the_head_comes_back_and_a_lost_node_is_told(secured: Secured) -> None:
    stack = secured.stack
    text = stream_text(secured.url, TOKENS, secured.connect)
    assert secured.redis.ask("DBSIZE") != ":0"
    head = stack.named("gcs_server")
    with steady_load(secured.url, text, TOKENS, clients=4, connect=secured.connect):
        head.kill()
        stack.wait_until(lambda: runs_anew(stack, head), PATIENCE_S, "another head")
        assert stack.kvasir("restart", "decode").returncode == 0
    stack.named("raylet").kill()
    assert stack.process.wait(timeout=PATIENCE_S) == 1
    assert stack.process.stdout is not None
    assert "Ray's node (raylet) has ended" in stack.process.stdout.read()
