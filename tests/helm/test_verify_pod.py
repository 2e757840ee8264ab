"""The pod in which `helm test` verifies a release: its containers run one after the other, and their logs are
the files of the report."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.helm.kubelet import Kubelet
from tests.helm.rendering import NAMESPACE, Pod, Release, render

from kvasir_platform.cli.main import parser

GATEWAY = f"llm-kvasir-router.{NAMESPACE}.svc:80"
KEY = "sk-kvasir-operator"
FIRST, SECOND = 5, 7
"""Token ids."""


def rendered() -> tuple[Release, Pod]:
    release = render({"test": {"verify": True}})
    return release, next(pod for pod in release.pods() if pod.of == "Pod/llm-kvasir-verify")


def answer(path: str, asked: Any, wrong: bool) -> tuple[str, Any]:
    """What a gateway with one whole worker answers, as JSON or as a stream. `wrong`: its answer differs from
    the reference, which does not hold the other token for likely."""
    if path == "/status":
        state = {"ready": True, "models": ["kvasir-tiny"], "deployment": "llm", "disaggregation": "never"}
        return "", {**state, "workers": [{"worker_id": "w", "pool": "serve", "engine": "vllm 0.32.0"}]}
    if path == "/tokenize":
        return "", {"tokens": [1] * 4096, "max_model_len": 4096}
    if path.startswith("/decisions/"):
        return "", {"decisions": [{"mode": "aggregated"}]}
    if asked.get("stream"):
        event = json.dumps({"choices": [{"text": "a"}]})
        return f"data: {event}\n\ndata: [DONE]\n\n", None
    token = FIRST if wrong and "prompt_logprobs" in asked else SECOND
    choice = {
        "token_ids": [token],
        "logprobs": {"top_logprobs": [{f"token_id:{token}": -0.1, "token_id:3": -9.0}]},
    }
    cached = {"cached_tokens": len(asked["prompt"])}
    return "", {"choices": [choice], "usage": {"prompt_tokens_details": cached}}


@contextmanager
def gateway(*, wrong: bool = False, away: bool = False) -> Iterator[str]:
    """Answers as a deployment; yields its address. `away`: none of it is ready."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, asked: Any) -> None:
            refused = away or self.headers["authorization"] != f"Bearer {KEY}"
            text, value = ("", {"error": {"message": "no"}}) if refused else answer(self.path, asked, wrong)
            body = (text or json.dumps(value)).encode()
            self.send_response(503 if refused else 200)
            self.send_header("x-request-id", "r")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def verified(folder: Path, address: str) -> tuple[int, dict[str, str]]:
    """Run the pod's containers in their order; the status of the last one, and the log of each."""
    release, pod = rendered()
    kubelet = Kubelet(folder, release, {GATEWAY: address}, lambda _: {"api-key": KEY.encode()}, print, {})
    logs, status = {}, 0
    folder.mkdir()
    try:
        for container in pod.containers:
            assert status == 0, "a pod ends with the first init container that fails"
            process = await kubelet.start(pod, "verify", "127.0.0.1", container_name=container["name"])
            status = await process.wait()
            logs[container["name"]] = kubelet.output("verify")
        return status, logs
    finally:
        await kubelet.close()


@pytest.mark.slow
async def test_the_logs_of_the_pod_are_the_report_as_json_and_as_html(tmp_path: Path) -> None:
    with gateway() as address:
        status, logs = await verified(tmp_path / "pod", address)
    assert status == 0, logs["verify"]
    assert list(logs) == ["verify", "page", "report"]
    found = json.loads(logs["report"])
    assert found["passed"]
    assert found["deployment"] == "llm"
    assert logs["page"].lower().startswith("<!doctype html>")
    assert "<h1>llm: passed</h1>" in logs["page"]
    assert "serve: vllm 0.32.0" in logs["page"]
    assert "as one worker alone: 1 tokens are equal" in logs["verify"]


@pytest.mark.slow
async def test_a_verification_that_fails_fails_the_pod_and_has_its_report_too(tmp_path: Path) -> None:
    with gateway(wrong=True) as address:
        status, logs = await verified(tmp_path / "pod", address)
    assert status == 1
    assert not json.loads(logs["report"])["passed"]
    assert "<h1>llm: FAILED</h1>" in logs["page"]


@pytest.mark.slow
async def test_a_verification_that_cannot_be_made_fails_the_pod_with_the_reason(tmp_path: Path) -> None:
    with gateway(away=True) as address:
        status, logs = await verified(tmp_path / "pod", address)
    assert status == 1
    assert "answered 503" in logs["verify"]
    assert (logs["page"], logs["report"]) == ("", "")


def test_it_asks_the_routers_with_the_operators_key_and_no_right_beyond_it() -> None:
    _, pod = rendered()
    (verify, page), (report,) = pod.spec["initContainers"], pod.spec["containers"]
    arguments = parser().parse_args(["verify", *verify["args"]])
    assert (arguments.address, arguments.model) == (f"http://{GATEWAY}", "kvasir-tiny")
    (key,) = (each["value"] for each in verify["env"] if each["name"] == "KVASIR_API_KEY_FILE")
    volumes = {each["name"]: each for each in pod.spec["volumes"]}
    assert volumes["operator-key"]["secret"]["secretName"] == "llm-kvasir-operator-key"
    mounts = {each["name"]: each["mountPath"] for each in verify["volumeMounts"]}
    assert key == f"{mounts['operator-key']}/{volumes['operator-key']['secret']['items'][0]['path']}"
    # Only the first one has the key.
    for other in (page, report):
        assert [(each["name"], each["readOnly"]) for each in other["volumeMounts"]] == [("report", True)]
        assert "env" not in other


@pytest.mark.parametrize("verify", [False, True])
def test_it_is_there_where_it_is_asked_for(verify: bool) -> None:
    made = [each["metadata"]["name"] for each in render({"test": {"verify": verify}}).of_kind("Pod")]
    assert made == ["llm-kvasir-test", *(["llm-kvasir-verify"] if verify else [])]
