"""The life cycle of `kvasir up` with a cheap deployment: real processes, files and signals, no engine."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.processes import command_line, lives

from kvasir_platform.cli.main import main
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.cluster.local.janitor import MARKER, Janitor
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir

SHM = Path("/dev/shm")
GRACE_S = 0.5
PROGRAM = f"""
import os, sys
from functools import partial
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.local.janitor import Janitor
from tests.kit.lab.cheap_launcher import Behaviour, CheapLauncher
behaviour = Behaviour(**eval(os.environ["BEHAVIOUR"]))
Janitor.grace_s = {GRACE_S}
sys.exit(main(make_launcher=partial(CheapLauncher, behaviour=behaviour)))
"""


class Kvasir:
    """The command in a home of its own, with cheap replicas."""

    def __init__(self, home: Path) -> None:
        self.runtime = RuntimeDir(home, "kvasir")
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**os.environ, "KVASIR_HOME": str(home)}

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM, *arguments]

    def run(self, *arguments: str, **behaviour: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own."""
        env = self.env | {"BEHAVIOUR": repr(behaviour)}
        return subprocess.run(
            self._command(*arguments), env=env, capture_output=True, text=True, check=False, timeout=60
        )

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that starts nothing, in this process: importing it takes longer than it runs."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("KVASIR_HOME", self.env["KVASIR_HOME"])
            patch.setattr(Janitor, "grace_s", GRACE_S)
            status = main(arguments)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    def begin(self, *arguments: str, **behaviour: Any) -> subprocess.Popen[str]:
        """Start in the foreground and return at once."""
        process = subprocess.Popen(
            self._command("up", "--port", "0", "-o", "json", *arguments),
            env=self.env | {"BEHAVIOUR": repr(behaviour)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def up(self, *arguments: str, **behaviour: Any) -> subprocess.Popen[str]:
        """Start in the foreground and return when it is ready."""
        process = self.begin(*arguments, **behaviour)
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "ready":
                return process
        raise AssertionError("up ended before it was ready")

    def state(self) -> DeploymentState:
        state = self.runtime.read()
        assert state is not None
        return state

    def marked(self) -> list[psutil.Process]:
        """Processes of this deployment that still live."""
        wanted = self.state().deployment_id
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == wanted and lives(process):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def shared_memory(self) -> list[Path]:
        """The shared-memory files that the replicas say they made and that still exist."""
        names = []
        for log in self.runtime.logs.glob("*.log*"):
            for line in log.read_text().splitlines():
                if line.startswith("shared memory "):
                    names.append(SHM / line.removeprefix("shared memory "))
        return [path for path in names if path.exists()]


@pytest.fixture
def kvasir(tmp_path: Path) -> Iterator[Kvasir]:
    command = Kvasir(tmp_path / "home")
    yield command
    command.ask("down")
    for process in command.started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for path in command.shared_memory():
        path.unlink()


def until(condition: Any, what: str) -> None:
    """Wait for another process; fails after 20 seconds."""
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"never happened: {what}")


def nothing_is_left(kvasir: Kvasir) -> None:
    state = kvasir.state()
    assert kvasir.marked() == []
    assert kvasir.shared_memory() == []
    assert not Path(state.temp_dir).exists()
    assert kvasir.runtime.holder() is None
    port = int(state.address.rpartition(":")[2])
    listeners = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert port not in [c.laddr.port for c in listeners if c.laddr]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_leaves_nothing(kvasir: Kvasir, number: signal.Signals) -> None:
    up = kvasir.up(shared_memory=True, orphan=True)
    assert len(kvasir.marked()) >= 4
    assert len(kvasir.shared_memory()) == 2
    up.send_signal(number)
    assert up.wait(timeout=30) == 0
    assert kvasir.state().phase == "stopped"
    nothing_is_left(kvasir)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_start_that_is_interrupted_ends_with_the_signals_status_and_leaves_nothing(
    kvasir: Kvasir, number: signal.Signals, status: int
) -> None:
    up = kvasir.begin(shared_memory=True, orphan=True, hangs="decode")
    until(lambda: len(kvasir.shared_memory()) == 2 and kvasir.state().address, "all parts have started")
    up.send_signal(number)
    assert up.wait(timeout=30) == status
    assert (kvasir.state().phase, kvasir.state().ready_at) == ("stopped", None)
    nothing_is_left(kvasir)


def test_down_from_another_terminal_stops_everything(kvasir: Kvasir) -> None:
    up = kvasir.up(shared_memory=True, orphan=True)
    down = kvasir.run("down")
    assert down.returncode == 0
    assert "nothing is left running" in down.stdout
    assert up.wait(timeout=30) == 0
    nothing_is_left(kvasir)
    assert "nothing runs" in kvasir.ask("down").stdout


def test_replicas_that_ignore_sigterm_are_killed(kvasir: Kvasir) -> None:
    up = kvasir.up(stubborn=True, orphan=True)
    assert kvasir.ask("down").returncode == 0
    assert up.wait(timeout=30) == 0
    nothing_is_left(kvasir)


def test_after_the_supervisor_is_killed_down_cleans_up(kvasir: Kvasir) -> None:
    up = kvasir.up(shared_memory=True, orphan=True, stubborn=True)
    until(lambda: len(kvasir.state().shared_memory) == 2, "the shared memory is recorded")
    up.kill()
    up.wait()
    status = kvasir.ask("status", "-o", "json")
    assert json.loads(status.stdout)[0]["phase"] == "crashed"
    down = kvasir.ask("down")
    assert down.returncode == 0
    assert "killed" in down.stdout
    nothing_is_left(kvasir)


def test_children_end_with_a_supervisor_that_is_killed(kvasir: Kvasir) -> None:
    up = kvasir.up()
    up.kill()
    up.wait()
    until(lambda: kvasir.marked() == [], "the leash pulls")


def test_a_start_after_a_crash_cleans_up_first(kvasir: Kvasir) -> None:
    first = kvasir.up(shared_memory=True, stubborn=True)
    until(lambda: len(kvasir.state().shared_memory) == 2, "the shared memory is recorded")
    before = kvasir.marked()
    first.kill()
    first.wait()
    kvasir.up()
    assert not any(lives(process) for process in before)
    assert kvasir.shared_memory() == []


def test_a_second_up_of_the_same_name_says_who_runs(kvasir: Kvasir) -> None:
    kvasir.up()
    second = kvasir.ask("up", "--port", "0")
    assert second.returncode == 1
    state = kvasir.state()
    assert f"kvasir already runs at http://{state.address} (pid {state.pid})" in second.stderr
    assert kvasir.runtime.holder() == state.pid


def test_two_deployments_stop_independently(kvasir: Kvasir) -> None:
    kvasir.up(shared_memory=True)
    kvasir.up("--set", "name=other", shared_memory=True)
    other = RuntimeDir(kvasir.runtime.path.parent, "other")
    ambiguous = kvasir.ask("down")
    assert ambiguous.returncode == 2
    assert "name one of: kvasir, other" in ambiguous.stderr
    assert kvasir.ask("down", "other").returncode == 0
    assert other.holder() is None
    assert len(kvasir.shared_memory()) == 2
    assert kvasir.ask("status").returncode == 0


def test_a_failed_replica_ends_the_start_with_its_log_and_leaves_nothing(kvasir: Kvasir) -> None:
    up = kvasir.run("up", "--port", "0", fails="decode")
    assert up.returncode == 1
    assert "decode-0" in up.stderr
    assert "ended with exit status 3" in up.stderr
    assert "| cannot load the model: not enough marbles" in up.stdout
    assert kvasir.state().phase == "failed"
    assert kvasir.marked() == []
    assert not Path(kvasir.state().temp_dir).exists()


@pytest.mark.parametrize(("options", "seconds"), [([], 1), (["--timeout", "2"], 2)])
def test_a_start_is_given_up_after_the_time_of_the_file_or_of_the_option(
    kvasir: Kvasir, options: list[str], seconds: int
) -> None:
    up = kvasir.run("up", "--port", "0", "--set", "scaling.start_timeout_s=1", *options, hangs="decode")
    assert up.returncode == 1
    assert f"gave up after {seconds} s: replicas are not ready: " in up.stderr
    assert "decode 0/1" in up.stderr


def test_a_part_that_dies_later_ends_the_deployment_with_status_1(kvasir: Kvasir) -> None:
    up = kvasir.up()
    victim = next(p for p in kvasir.marked() if "http.server" in command_line(p))
    victim.kill()
    assert up.wait(timeout=30) == 1
    assert "router" in kvasir.state().failure
    nothing_is_left(kvasir)


def test_status_shows_workers_and_processes(kvasir: Kvasir) -> None:
    kvasir.up()
    until(lambda: len(kvasir.state().processes) >= 3, "the inventory is written")
    text = kvasir.run("status").stdout
    assert "kvasir: ready, kvasir-tiny at http://127.0.0.1:" in text
    assert "w-1     decode  ready  2" in text
    (report,) = json.loads(kvasir.run("-o", "json", "status").stdout)
    assert report["workers"][0]["load"]["kv_usage"] == 0.25
    assert report["processes"][0]["rss"] > 1 << 20


@pytest.mark.parametrize("clients", [False, True], ids=["any client", "certified clients"])
def test_over_https_it_gets_ready_and_is_asked_by_every_command(
    kvasir: Kvasir, tmp_path: Path, clients: bool
) -> None:
    now = time.time()
    authority = Authority.make("test", now - 60.0, now + 86_400.0)
    own, ca_file = tmp_path / "own.pem", tmp_path / "ca.pem"
    own.write_bytes(authority.certify("spiffe://x/y", "api.example.com", now - 60.0, now + 86_400.0))
    ca_file.write_bytes(authority.pem)
    asks = f", client_ca_file: {ca_file}" if clients else ""
    kvasir.up("--set", f"gateway.tls={{cert_file: {own}, key_file: {own}{asks}}}")
    url = f"https://{kvasir.state().address}"
    (report,) = json.loads(kvasir.ask("-o", "json", "status").stdout)
    assert (report["url"], report["problem"]) == (url, "")
    assert report["workers"][0]["worker_id"] == "w-1"
    assert f"kvasir-tiny at {url}, up" in kvasir.ask("status").stdout
    assert "w-1" in kvasir.ask("get", "workers").stdout
    assert f"already runs at {url}" in kvasir.ask("up", "--port", "0").stderr
    assert kvasir.state().operator_certificate == (str(kvasir.runtime.operator_file) if clients else "")


def test_detached_it_returns_when_ready_and_goes_on(kvasir: Kvasir) -> None:
    up = kvasir.run("up", "--port", "0", "--detach")
    assert up.returncode == 0
    assert "is served at http://127.0.0.1:" in up.stdout
    assert kvasir.runtime.holder() == kvasir.state().pid
    assert kvasir.ask("down").returncode == 0
    nothing_is_left(kvasir)


def test_detached_a_failed_start_is_reported_as_in_the_foreground(kvasir: Kvasir) -> None:
    up = kvasir.run("up", "--port", "0", "--detach", fails="prefill")
    assert up.returncode == 1
    assert "not enough marbles" in up.stdout


def test_what_is_on_disk_is_private(kvasir: Kvasir) -> None:
    kvasir.up()
    folder = kvasir.runtime.path
    assert folder.stat().st_mode & 0o077 == 0
    modes: dict[Path, int] = {}
    for path in folder.rglob("*"):
        # A file that was just written anew has left its temporary name.
        with suppress(FileNotFoundError):
            modes[path] = path.stat().st_mode
    assert folder / "state.json" in modes
    assert [path for path, mode in modes.items() if mode & 0o077] == []
