"""The product as a user starts it: `kvasir up`, real Ray Serve, real vLLM, real sockets."""

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
from tests.kit.lab.invariants import invariant_violations
from tests.kit.processes import command_line

START_S = 240.0


@dataclass(slots=True)
class Stack:
    """A deployment that answers. `home` is its KVASIR_HOME, and `headers` go with questions about itself."""

    process: subprocess.Popen[str]
    address: str
    home: Path
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def page(self, path: str) -> httpx.Response:
        """One of the gateway's own pages; raises httpx.HTTPError."""
        return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=10).raise_for_status()

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
        """Poll until true; returns the seconds it took. Fails the test with `what` otherwise."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return time.monotonic() - began
            if time.monotonic() - began > timeout_s:
                pytest.fail(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.05)

    def idle(self) -> bool:
        """Whether no worker holds or runs anything, as router and engines see it."""
        return not any(
            worker["in_flight"] or (worker["load"] or {}).get("running") for worker in self.workers()
        )

    def replica(self, pool: str) -> psutil.Process:
        """The process of a pool's (only) Ray Serve replica."""
        for process in self.processes():
            if f"ServeReplica:kvasir-{pool}:" in command_line(process):
                return process
        pytest.fail(f"no replica of {pool} is running")


@contextlib.contextmanager
def _start_stack(home: Path, *arguments: str, headers: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """`kvasir up` with these arguments on a free port; Ctrl-C at the end."""
    log = (home / "up.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir_platform.cli.main", "up", "--port", "0", "-o", "json", *arguments],
        env={**os.environ, "KVASIR_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
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


@pytest.fixture(scope="session")
def start_stack() -> Callable[..., contextlib.AbstractContextManager[Stack]]:
    """Starts `kvasir up` in a given home with more arguments."""
    return _start_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded default, prefill and decode apart, in a precision that makes tokens comparable."""
    with _start_stack(tmp_path_factory.mktemp("kvasir"), "--set", "model.dtype=float32") as running:
        yield running


@pytest.fixture(autouse=True)
def invariants(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the stack: nothing runs, is pinned or accounted, and no stream lost a token."""
    yield
    if "stack" not in request.fixturenames:
        return
    running: Stack = request.getfixturevalue("stack")
    left: list[str] = []

    def at_rest() -> bool:
        left[:] = invariant_violations(running.page("/status").json(), running.page("/metrics").text)
        return not left

    try:
        running.wait_until(at_rest, 30.0, "rest")
    except pytest.fail.Exception:
        pytest.fail(f"after the test there remain: {'; '.join(left)}")
