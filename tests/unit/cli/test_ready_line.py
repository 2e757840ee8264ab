"""What `kvasir up` shows to paste into a terminal, once a deployment serves."""

from __future__ import annotations

import pytest

from kvasir.config.loader import loads
from kvasir_platform.cli.progress import curl_line

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
