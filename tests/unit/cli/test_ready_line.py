"""The commands that `kvasir up` prints once a deployment serves."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvasir.config.load.loader import loads
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.progress import ProgressDisplay, console_url, curl_line
from kvasir_platform.cluster.local.supervisor import StartProgress

EMBEDS = "pools: [{name: v, role: embed}]"
BOTH = """
disaggregation: never
models: [{name: talker}]
pools: [{name: v, role: embed}, {name: t, role: both, model: talker}]
"""


@pytest.mark.parametrize(
    ("spec", "path", "model"),
    [
        ("", "/v1/chat/completions", "kvasir-tiny"),
        (EMBEDS, "/v1/embeddings", "kvasir-tiny"),
        (BOTH, "/v1/chat/completions", "talker"),
    ],
)
def test_the_request_is_one_that_the_deployment_can_serve(spec: str, path: str, model: str) -> None:
    shown = curl_line(loads(spec, "t.yaml"), "http://h:1")
    assert f"http://h:1{path} " in shown
    assert f'"model": "{model}"' in shown


@pytest.mark.parametrize(
    ("spec", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("gateway: {tls: {cert_file: own.pem, key_file: own.pem}}", "https://127.0.0.1:8000"),
    ],
)
def test_the_address_is_one_to_open(spec: str, url: str) -> None:
    out = io.StringIO()
    display = ProgressDisplay(
        loads(spec, "t.yaml"), CommandOutput(json=False, out=out), Path("logs"), lambda: 1.0
    )
    display.show(StartProgress("ready", text="0.0.0.0:8000"))
    assert f"kvasir-tiny is served at {url} after" in out.getvalue()
    assert f"curl -N {url}/v1/" in out.getvalue()
    assert f"console         {url}/console\n" in out.getvalue()


def test_the_console_is_named_at_its_own_port() -> None:
    spec = loads("gateway: {console: {port: 9000}}", "t.yaml")
    assert console_url(spec, "http://127.0.0.1:8000") == "http://127.0.0.1:9000/console"
