"""`kvasir up` with HTTPS and client certificates: it becomes ready, and every command reaches its gateway."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.kit.lab.invariants import invariant_violations

from kvasir_platform.cluster.certificates import Authority

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "api.example.com"
SPEC = """
disaggregation: never
pools: [{{name: whole, role: both, engine: {{kind: sim}}, cpus: 0.1}}]
gateway:
  edges: {edges}
  tls: {{cert_file: own.pem, key_file: own.pem, client_ca_file: clients.pem}}
"""


@pytest.mark.parametrize("edges", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_with_https_for_certified_clients_up_is_ready_and_commands_work(
    start_stack: Callable[..., AbstractContextManager[Stack]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edges: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    now = time.time()
    authority = Authority.make("test", now - 60.0, now + 86_400.0)
    for file in ("own.pem", "client.pem"):
        Path(file).write_bytes(authority.certify("spiffe://x/y", NAME, now - 60.0, now + 86_400.0))
    Path("clients.pem").write_bytes(authority.pem)
    Path("kvasir.yaml").write_text(SPEC.format(edges=edges))
    with start_stack(tmp_path, "-f", "kvasir.yaml", secure=True) as stack:
        monkeypatch.chdir("/")
        (status,) = json.loads(stack.kvasir("-o", "json", "status").stdout)
        assert (status["url"], status["problem"]) == (f"https://{stack.address}", "")
        (worker,) = json.loads(stack.kvasir("-o", "json", "get", "workers").stdout)
        assert worker["state"] == "ready"
        context = ssl.create_default_context(cafile=str(tmp_path / "clients.pem"))
        context.load_cert_chain(tmp_path / "client.pem")
        with httpx.Client(base_url=f"https://{stack.address}", verify=context, timeout=30) as client:
            answer = client.post(
                "/v1/completions",
                json={"model": "kvasir-tiny", "prompt": "hi", "max_tokens": 2},
                extensions={"sni_hostname": NAME},
            )
            assert answer.status_code == 200
            figures = client.get("/metrics", extensions={"sni_hostname": NAME}).text

            def at_rest() -> bool:
                sni = {"sni_hostname": NAME}
                status = client.get("/status", extensions=sni).json()
                return not invariant_violations(status, client.get("/metrics", extensions=sni).text)

            stack.wait_until(at_rest, 30.0, "rest")
        (expiry,) = [line for line in figures.splitlines() if line.startswith("kvasir_gateway_certificate_")]
        assert abs(float(expiry.split()[1]) - (now + 86_400.0)) < 2.0
        explained = stack.kvasir("explain", answer.headers["x-request-id"])
        assert explained.returncode == 0, explained.stderr
        drained = stack.kvasir("drain", worker["worker_id"], "--timeout", "60")
        assert drained.returncode == 0, drained.stderr
        restarted = stack.kvasir("restart", "whole")
        assert "whole is restarted" in restarted.stdout
