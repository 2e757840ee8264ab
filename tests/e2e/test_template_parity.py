"""A real vLLM worker with another chat template or special token than the router's is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.config.load.model_files import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.soak]

Spoil = Callable[[dict[str, Any]], dict[str, Any]]
Start = Callable[..., AbstractContextManager[str]]


def broken_template(config: dict[str, Any]) -> dict[str, Any]:
    template: str = config["chat_template"]
    changed = template.replace("'<|user|>' + text(message.content)", "'<|user|> ' + text(message.content)")
    assert changed != template
    return {**config, "chat_template": changed}


def other_special_token(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "bos_token": "<|eos|>", "added_tokens_decoder": {}}


def unchanged(config: dict[str, Any]) -> dict[str, Any]:
    return config


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts one of our processes and gives its address; ends it on leaving."""

    @contextmanager
    def app(module: str, *arguments: str) -> Iterator[str]:
        log = tmp_path / f"{module}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", f"kvasir_platform.apps.{module}", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            try:
                assert process.stdout is not None
                yield next(
                    json.loads(line)["address"]
                    for line in process.stdout
                    if line.startswith('{"event"') and "address" in line
                )
            except StopIteration:
                pytest.fail(f"{module} ended without an address: {log.read_text()[-2000:]}")
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)

    return app


def registered(url: str) -> dict[str, Any]:
    """The worker, once it was accepted or refused."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        (worker,) = httpx.get(f"{url}/status").json()["workers"]
        if worker["state"] in ("ready", "refused"):
            found: dict[str, Any] = worker
            return found
        time.sleep(0.05)
    pytest.fail("the worker was neither accepted nor refused")


@dataclass(frozen=True)
class Case:
    """How the worker's copy of the model is changed, and what the first difference shows of each side."""

    spoil: Spoil
    digest_differs: bool = False
    worker_has: str = ""
    router_has: str = ""


@pytest.mark.parametrize(
    "case",
    [
        Case(broken_template, True, "<|user|> What is the", "<|user|>What is the"),
        Case(other_special_token, False, "'<|eos|><|user|>What", "'<|bos|><|user|>What"),
        Case(unchanged),
    ],
    ids=["template", "special-token", "unchanged"],
)
def test_a_worker_that_renders_otherwise_is_refused_with_both_sides_shown(
    tmp_path: Path, start: Start, case: Case
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("kvasir-tiny"), folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(case.spoil(json.loads(config.read_text()))))
    token = tmp_path / "token"
    token.write_text(os.urandom(16).hex())

    def spec(name: str, source: str, endpoint: str) -> str:
        path = tmp_path / f"{name}.yaml"
        body = {
            "disaggregation": "never",
            "model": {"source": source, "served_name": "kvasir-tiny"},
            "pools": [{"name": "both", "role": "both"}],
            "discovery": {"kind": "static", "endpoints": [f"both={endpoint}"]},
            "gateway": {"port": 0},
        }
        path.write_text(json.dumps(body))
        return f"--deployment={path}"

    secret = f"--token-file={token}"
    with (
        start("worker_node", spec("worker", str(folder), "127.0.0.1:1"), secret, "--pool=both") as address,
        start("router_app", spec("router", "kvasir-tiny", address), secret) as gateway,
    ):
        worker = registered(f"http://{gateway}")
        ready = httpx.get(f"http://{gateway}/health/ready")
    if case.spoil is unchanged:
        assert (worker["state"], worker["reason"], ready.status_code) == ("ready", "", 200)
        return
    reason = worker["reason"]
    assert (worker["state"], ready.status_code) == ("refused", 503)
    assert ("tokenizer_digest: " in reason) is case.digest_differs
    shown = reason[reason.index("golden.chat: text from character ") :]
    theirs, _, ours = shown.partition(" != ")
    assert case.worker_has in theirs
    assert case.router_has in ours
    assert "(router)" in ours
