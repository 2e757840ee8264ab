"""`kvasir bench` as a user calls it, against a scripted server in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir_platform.cli.main import main, parser
from kvasir_platform.workload.shapes import PRESETS

ROOT = Path(__file__).resolve().parents[3]


def server(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kit.openai_server", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server("--first-ms", "5", "--gap-ms", "1") as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


SHORT = ("--workload", "chat:rate=200,think=0.1,context=600,prefix=50", "--requests", "40")


def test_a_run_prints_its_figures_and_writes_its_files(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"{tmp_path}/{name}" for name in ("run.json", "run.html")]
    assert main(["bench", f"{url}/v1/", *SHORT, "--json", files[0], "--html", files[1]]) == 0
    text = capsys.readouterr().out
    assert "TTFT, ms" in text
    assert "40 of 40 requests" in text
    result = json.loads(Path(files[0]).read_text())
    assert result["figures"]["succeeded"] == 40
    assert abs(result["figures"]["prompt_token_error"]) < 0.02
    assert result["url"] == url
    assert Path(files[1]).read_text().startswith("<!doctype html>")
    assert main(["bench", "compare", files[0], files[0], "--fail-above", "1"]) == 0
    assert "TTFT p95, ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "http://127.0.0.1:9", "--json"],
        ["bench", "http://127.0.0.1:9", "--html"],
        ["plan", "--html"],
        ["plan", "--png"],
        ["sim", "--html"],
        ["sim", "--png"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"{tmp_path}/absent/file"]) != 0
    assert (
        f"{command[-1]} {tmp_path}/absent/file: {tmp_path}/absent is not a folder" in capsys.readouterr().err
    )
    assert main([*command, str(tmp_path)]) != 0
    assert "that is a folder; name a file" in capsys.readouterr().err


def test_a_closed_loop_repeats_its_workload_until_its_time_is_over(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--concurrency", "4", "--duration", "0.5", "--requests", "3", "-o", "json"]
    assert main(["bench", url, "--workload", "synthetic:output=2", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["mode"] == "closed loop, 4 at a time"
    assert result["figures"]["succeeded"] > 3


def test_embeddings_go_to_their_endpoint(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", url, "--workload", "embeddings", "--requests", "5", "--rate", "100"]) == 0
    assert "embeddings, open loop" in capsys.readouterr().out


def test_a_ramp_reports_its_knee(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    # No stream has a token within a nanosecond, so the ramp ends at once.
    options = [
        "--ramp",
        "--ramp-from",
        "40",
        "--ramp-step",
        "0.1",
        "--slo",
        "ttft=0.000001ms",
        "--warmup",
        "0",
    ]
    assert main(["bench", url, "--workload", "synthetic:output=2", *options]) == 0
    assert "at no rate that was tried 90% of the requests meet the SLO" in capsys.readouterr().out


def test_an_interrupt_gives_the_results_so_far(url: str) -> None:
    command = [sys.executable, "-m", "kvasir_platform.cli.main", "bench", url, "--rate", "50"]
    with subprocess.Popen(
        [*command, "--duration", "12", "--warmup", "1"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        run.send_signal(signal.SIGINT)
        text = run.stdout.read()
    assert line.startswith("... load [")
    assert run.returncode == 130
    assert "interrupted: these are the figures until then" in text


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        (["http://127.0.0.1:9"], 1, "does not answer"),
        (["ftp://here"], 2, "name http://HOST:PORT or https://HOST:PORT"),
        (["http://here", "--workload", "nothing"], 2, "nothing is no preset"),
        (["http://here", "--slo", "ttft=1"], 2, "with a unit"),
        (["http://here", "--body", "[]"], 2, "name an object"),
        (["http://here", "--api-key-env", "NO_SUCH"], 2, "the environment has no such variable"),
        (["http://here", "--api-key-file", "/no/such"], 2, "--api-key-file /no/such"),
        (["http://here", "--ramp", "--concurrency", "2"], 2, "leave --concurrency and --rate out"),
        (["http://here", "--ramp", "--rate", "2"], 2, "leave --concurrency and --rate out"),
        (["http://here", "http://there"], 2, "one URL is enough"),
        (["https://here", "--cacert", "/no/such"], 2, "--cacert /no/such cannot be used"),
        (["compare", "one.json"], 2, "compare two files"),
        (["compare", "/no/such", "/no/such"], 2, "/no/such: No such file"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    options: list[str], status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == status
    assert reason in capsys.readouterr().err


def test_the_help_lists_presets_and_parameters() -> None:
    groups = [each for each in parser()._actions if hasattr(each, "choices") and each.dest == "command"]
    assert isinstance(groups[0].choices, dict)
    text = groups[0].choices["bench"].format_help()
    assert all(f"\n  {name} " in text for name in PRESETS)
    assert "tokens of a shared prefix" in text
