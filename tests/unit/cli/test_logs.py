"""`kvasir logs`: the file of a worker, its last lines, those since a time, and what is appended."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.live.log_files import SinceFilter, appended, find_log, last_lines, time_in
from kvasir_platform.cli.live.logs import LogArguments, local_logs
from kvasir_platform.cli.main import main

NOON = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, text in {
        "router.log": "routing\n",
        "worker-decode-11.log": "this is worker decode-aa, at 127.0.0.1:1\n",
        "worker-decode-12.log": "started\n",
        "worker-decode-12.log.1": "this is worker decode-bb, at 127.0.0.1:2\n",
        "worker-decode-big-13.log": "this is worker decode-big-cc, at 127.0.0.1:3\n",
    }.items():
        (logs / name).write_text(text)
    for age, name in enumerate(("worker-decode-12.log", "worker-decode-11.log")):
        os.utime(logs / name, (1000.0 - age, 1000.0 - age))
    return logs


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("router", "router.log"),
        ("decode-aa", "worker-decode-11.log"),
        ("decode-bb", "worker-decode-12.log"),
        ("decode", "worker-decode-12.log"),
        ("decode-big", "worker-decode-big-13.log"),
        ("decode-big-cc", "worker-decode-big-13.log"),
    ],
)
def test_the_log_of_a_worker_a_pool_and_the_router_is_found(folder: Path, source: str, file: str) -> None:
    assert find_log(folder, source).name == file


def test_a_log_that_only_names_a_worker_is_not_its_log(folder: Path) -> None:
    newest = folder / "worker-decode-14.log"
    newest.write_text("this is worker decode-aaa, at 127.0.0.1:4\npulling KV from decode-aa, which is lost\n")
    assert find_log(folder, "decode-aaa") == newest
    assert find_log(folder, "decode-aa").name == "worker-decode-11.log"
    with pytest.raises(ConfigError, match="no log of 'decode-a'"):
        find_log(folder, "decode-a")


@pytest.mark.parametrize("source", ["decode-zz", "control", "../secret", "prefill"])
def test_a_name_without_a_log_says_which_there_are(folder: Path, source: str) -> None:
    with pytest.raises(ConfigError, match=r"name a worker as .* or one of: decode, decode-big, router"):
        find_log(folder, source)


def test_the_last_lines_go_back_into_the_earlier_part(folder: Path) -> None:
    path = folder / "worker-decode-12.log"
    assert last_lines(path, None, None) == ["this is worker decode-bb, at 127.0.0.1:2", "started"]
    assert last_lines(path, 1, None) == ["started"]
    assert last_lines(path, 0, None) == []
    assert last_lines(folder / "gone.log", 5, None) == []


def test_times_of_our_logs_and_of_the_engines_are_read() -> None:
    assert time_in('{"ts":"2030-01-01T12:00:00.123+00:00","level":"info"}', None) == NOON
    assert time_in("WARNING 2030-01-01 12:00:00,728 MainProcess 1 vllm: x", UTC) == NOON
    assert time_in("no time here", UTC) is None
    assert time_in("2030-13-99 12:00:00", UTC) is None


def test_lines_since_a_time_are_kept_with_those_that_follow_without_one() -> None:
    chosen = SinceFilter(NOON)
    kept = [
        line
        for line in (
            "Traceback before",
            '{"ts":"2030-01-01T11:59:59.000+00:00"}',
            "  its second line",
            '{"ts":"2030-01-01T12:00:01.000+00:00"}',
            "  its second line",
        )
        if chosen.keeps(line)
    ]
    assert kept == ['{"ts":"2030-01-01T12:00:01.000+00:00"}', "  its second line"]


def written(path: Path, text: str, mode: str = "a") -> None:
    with path.open(mode) as stream:
        stream.write(text)


class Script(threading.Event):
    """A stop that never waits; after the last step it is set."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        super().__init__()
        self.steps = list(steps)

    def wait(self, timeout: float | None = None) -> bool:
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


def test_what_is_appended_is_followed_through_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.write_text("old\n")

    def write(text: str, mode: str = "a") -> Callable[[], Any]:
        return lambda: written(path, text, mode)

    def rename() -> None:
        path.replace(tmp_path / "router.log.1")
        path.write_text("in a new file\n")

    stop = Script(write("one\ntw"), write("o\n"), rename, write("cut\n", "w"), path.unlink, lambda: None)
    assert list(appended(path, stop)) == ["one", "two", "in a new file", "cut"]


def test_earlier_lines_are_printed_and_then_what_follows(folder: Path) -> None:
    out = io.StringIO()
    router = folder / "router.log"
    router.write_text("".join(f"line {i}\n" for i in range(300)))
    stop = Script(lambda: written(router, "new\n"))
    wanted = LogArguments("router", follow=True)
    assert local_logs(wanted, folder, CommandOutput(json=False, out=out), stop, now=lambda: NOON) == 0
    lines = out.getvalue().splitlines()
    assert (lines[0], lines[-2:]) == ("line 100", ["line 299", "new"])


def test_where_nothing_runs_it_says_what_to_run_in_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["logs", "router"]) == 1
    assert "kubectl exec deploy/NAME-router -- kvasir logs WORKER" in capsys.readouterr().err
