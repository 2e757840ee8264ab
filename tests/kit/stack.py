"""A deployment started by `kvasir up`, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.kit.lab.invariants import REST_S, SPARE_DESCRIPTORS, invariant_violations
from tests.kit.lab.processes import descriptors
from tests.kit.processes import command_line, lives
from tests.kit.suite.started import count_start

from kvasir.config.load.model_files import resolve_model

START_S = 240.0
CONTEXT = 4096
ADAPTER = resolve_model("kvasir-tiny").with_name("kvasir-tiny-lora")


@dataclass(slots=True)
class Stack:
    """A running deployment. `home` is its KVASIR_HOME; `headers` are sent with requests for its pages."""

    process: subprocess.Popen[str]
    address: str
    home: Path
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def page(self, path: str) -> httpx.Response:
        """One of the gateway's pages. Raise httpx.HTTPError."""
        return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=10).raise_for_status()

    @property
    def ended(self) -> bool:
        """Whether `kvasir up` has ended."""
        return self.process.poll() is not None

    def workers(self) -> list[dict[str, Any]]:
        body = self.page("/status").json()
        found: list[dict[str, Any]] = body["workers"] if isinstance(body, dict) else body
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.page("/metrics").text.splitlines()
            if line.split("{")[0].split(" ")[0] == name and all(each in line for each in wanted)
        )

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def kvasir(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvasir_platform.cli.main", *arguments],
            env={**os.environ, "KVASIR_HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @staticmethod
    def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Poll until the condition is true; return the seconds it took. Fail with `what` on timeout."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return time.monotonic() - began
            if time.monotonic() - began > timeout_s:
                pytest.fail(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.05)

    def idle(self) -> bool:
        """Whether no worker holds or runs anything, according to router and engines."""
        return not any(
            worker["in_flight"] or (worker["load"] or {}).get("running") for worker in self.workers()
        )

    def replica(self, pool: str) -> psutil.Process:
        """The process of a pool's (only) Ray Serve replica."""
        for process in self.processes():
            if f"ServeReplica:kvasir-{pool}:" in command_line(process):
                return process
        pytest.fail(f"no replica of {pool} is running")

    def named(self, name: str) -> psutil.Process:
        """A live process by its program, such as `gcs_server`. Fail if there is none."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name and lives(process):
                    return process
        pytest.fail(f"no {name} runs")


def runs_anew(stack: Stack, dead: psutil.Process) -> bool:
    """Whether Ray's head runs again after this one."""
    with contextlib.suppress(pytest.fail.Exception):
        return stack.named("gcs_server").pid != dead.pid
    return False


@contextlib.contextmanager
def start_stack(home: Path, *arguments: str, headers: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """`kvasir up` with these arguments on a free port; interrupted (Ctrl-C) at the end."""
    count_start("deployments by `kvasir up`", home.name)
    log = (home / "up.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir_platform.cli.main", "up", "--port", "0", "-o", "json", *arguments],
        env={**os.environ, "KVASIR_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        process_group=0,
    )
    try:
        yield Stack(process, _await_ready(process, home), home, headers or {})
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        log.close()
        if process.stdout is not None:
            process.stdout.close()
        _count_engines(home)


def _count_engines(home: Path) -> None:
    """Count the replicas of vLLM that a deployment has had, each of which has left a log on each node."""
    for spec in home.glob("*/deployment.json"):
        for pool in json.loads(spec.read_text())["pools"]:
            engine = pool.get("engine", {})
            if engine.get("kind", "vllm") == "vllm":
                logs = list(spec.parent.glob(f"logs/worker-{pool['name']}-*.log"))
                for _ in logs[:: engine.get("nodes", 1)]:
                    count_start("engines of vLLM", f"{home.name}: {pool['name']}")


@contextlib.contextmanager
def another_router(stack: Stack, folder: Path, **changes: Any) -> Iterator[Stack]:
    """A router of its own, with a gateway, in front of the workers of `stack`; `changes` are fields of the
    deployment that differ. Its spec and its log are in `folder`. After a block that succeeds it must be at
    rest, with the descriptors that it had."""
    (running,) = [each.cmdline() for each in stack.processes() if "router_app" in command_line(each)]
    spec = json.loads((stack.home / "kvasir" / "deployment.json").read_text())
    workers = [f"{worker['pool']}={worker['address']}" for worker in stack.workers()]
    spec |= changes | {"discovery": {"kind": "static", "endpoints": workers}}
    spec["gateway"] = spec.get("gateway", {}) | {"port": 0}
    (folder / "router.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "kvasir_platform.apps.router_app", f"--deployment={folder}/router.json"]
    command += [each for each in running if each.startswith(("--token-file", "--tls-dir"))]
    log = folder / "router.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, text=True)
    try:
        Stack.wait_until(lambda: _listening(log) is not None, 60.0, "the router listens")
        made = Stack(process, str(_listening(log)), stack.home)
        made.wait_until(
            lambda: [worker["state"] for worker in made.workers()] == ["ready"] * len(workers),
            30.0,
            "all workers in use",
        )
        began = descriptors(process.pid)
        yield made
        check_rest(made)
        most = began + SPARE_DESCRIPTORS
        made.wait_until(lambda: descriptors(process.pid) <= most, REST_S, "descriptors of the router")
    finally:
        process.terminate()
        process.wait(timeout=30)


def check_rest(running: Stack) -> None:
    """Wait until the stack is at rest, unless the test stopped it; fail with what remains."""
    left = ["its gateway does not answer"]

    def at_rest() -> bool:
        if running.ended:
            return True
        left[:] = invariant_violations(running.page("/status").json(), running.page("/metrics").text)
        return not left

    try:
        running.wait_until(at_rest, REST_S, "rest")
    except pytest.fail.Exception:
        pytest.fail(f"after the test there remain: {'; '.join(left)}")


def _listening(log: Path) -> str | None:
    """The address that a router has printed."""
    whole = log.read_text().rpartition("\n")[0].splitlines()
    events = (json.loads(line) for line in whole if line.startswith('{"event"'))
    return next((each["address"] for each in events if each["event"] == "listening"), None)


def _await_ready(process: subprocess.Popen[str], home: Path) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        event = json.loads(line)
        if event.get("event") == "ready":
            return str(event["text"])
    pytest.fail(
        f"kvasir up ended before it was ready:\n{''.join(seen[-20:])}\n{(home / 'up.log').read_text()}"
    )
