"""The errors of an engine's processes reach the process that started it."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir_workers.engines.vllm.setup import engine_errors
from kvasir_workers.engines.vllm.setup.engine_errors import (
    CONFIG_VARIABLE,
    EngineError,
    EngineErrors,
    ErrorRecords,
    memory_kills,
    root_error,
)

FRONT = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
RANK = EngineError("WorkerProc failed to start.", "ValueError", "No available memory for the cache blocks.")
CORE = EngineError(
    "EngineCore failed to start.",
    "Exception",
    "WorkerProc initialization failed due to an exception in a background process.",
)


@pytest.fixture
def errors() -> Iterator[EngineErrors]:
    made = EngineErrors("WARNING")
    yield made
    made.close()


@pytest.fixture
def child(errors: EngineErrors) -> logging.Logger:
    """A logger of vLLM as the configuration makes it, in place of a child process."""
    config = json.loads(Path(errors.variables[CONFIG_VARIABLE]).read_text())
    path = config["handlers"]["records"]["path"]
    logger = logging.Logger("vllm.v1.engine.core", logging.WARNING)
    logger.addHandler(ErrorRecords(path))
    return logger


def fail(logger: logging.Logger, text: str, error: Exception) -> None:
    try:
        raise error
    except Exception:
        logger.exception(text)


def test_the_configuration_names_classes_that_logging_finds(errors: EngineErrors) -> None:
    config = json.loads(Path(errors.variables[CONFIG_VARIABLE]).read_text())
    resolver = logging.config.BaseConfigurator({})
    assert resolver.resolve(config["handlers"]["records"]["class"]) is ErrorRecords
    assert config["loggers"]["vllm"] == {
        "handlers": ["stderr", "records"],
        "level": "WARNING",
        "propagate": False,
    }
    assert not config["disable_existing_loggers"]


def test_the_error_that_ended_a_child_is_the_cause_of_the_start(
    errors: EngineErrors, child: logging.Logger
) -> None:
    child.error("no exception")
    fail(child, "EngineCore failed to start.", ValueError("No available memory for the cache blocks. Try x."))
    reason = errors.start_error(FRONT, "serve", "pool serve")
    assert reason.message == "pool serve does not start: no memory is left for the KV cache"
    assert reason.remedy.startswith("raise pools.serve.engine.kv_cache_bytes")
    assert reason.permanent
    assert errors.why(FRONT) == "ValueError: No available memory for the cache blocks. Try x."


def test_an_error_of_the_front_itself_is_its_own_cause(errors: EngineErrors, child: logging.Logger) -> None:
    fail(child, "something else failed", ValueError("unrelated"))
    reason = errors.start_error(KeyError("head_dim"), "serve", "pool serve")
    assert reason.message == "pool serve does not start: KeyError: 'head_dim'"
    assert errors.why("it was stopped") == "it was stopped"


def test_without_any_error_the_end_of_the_process_is_described(
    errors: EngineErrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = errors.start_error(FRONT, "serve", "pool serve")
    assert reason.message == "pool serve does not start: a process of the engine ended and logged no error"
    assert not reason.permanent
    assert errors.why(FRONT) == "a process of the engine ended and logged no error"
    before = memory_kills()
    monkeypatch.setattr(engine_errors, "memory_kills", lambda: before + 1)
    assert "memory ran out" in errors.start_error(FRONT, "serve", "pool serve").message


PRINTS = """
import os, subprocess, sys
from kvasir_workers.engines.vllm.setup.engine_errors import EngineErrors
print("ValueError: of an earlier engine", file=sys.stderr, flush=True)
errors = EngineErrors("WARNING")
print(errors.why("Engine core initialization failed."))
subprocess.run([sys.executable, "-c", "import kvasir.no_such_module"])
print(errors.why("Engine core initialization failed."))
"""


def test_an_exception_that_a_child_could_only_print_is_told(tmp_path: Path) -> None:
    with (tmp_path / "worker.log").open("wb") as output:
        run = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=output, text=True, check=True
        )
    ended = "a process of the engine ended and logged no error"
    printed = "ModuleNotFoundError: No module named 'kvasir.no_such_module'"
    assert run.stdout.splitlines() == [ended, f"{ended}; the last exception that was printed is {printed}"]


def test_the_root_is_what_a_rank_raised_and_not_what_its_core_makes_of_it() -> None:
    caught = EngineError("retrying without the fused kernel", "ImportError", "no module named kernel")
    assert root_error([caught, RANK, CORE]) == RANK
    assert root_error([caught, CORE]) == caught
    assert root_error([CORE]) is None
    assert root_error([]) is None


def test_records_are_bounded_and_end_with_the_folder(errors: EngineErrors, child: logging.Logger) -> None:
    path = Path(errors.variables[CONFIG_VARIABLE]).with_name("errors.jsonl")
    for _ in range(100):
        fail(child, "EngineCore failed to start.", ValueError("x" * 10_000))
    assert len(path.read_bytes().splitlines()) == 64
    assert path.stat().st_size < 64 * 9000
    errors.close()
    fail(child, "EngineCore failed to start.", ValueError("late"))
    assert not path.exists()


def test_the_folder_goes_with_the_process_that_made_it() -> None:
    program = (
        "from kvasir_workers.engines.vllm.setup.engine_errors import CONFIG_VARIABLE, EngineErrors\n"
        "made = EngineErrors('WARNING')\n"
        "print(made.variables[CONFIG_VARIABLE], made._folder.exists())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    path, there = run.stdout.split()
    assert there == "True"
    assert not Path(path).parent.exists()


def test_a_closed_folder_is_not_left_in_the_environment(
    errors: EngineErrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, errors.variables[CONFIG_VARIABLE])
    errors.close()
    assert CONFIG_VARIABLE not in os.environ
    monkeypatch.setenv(CONFIG_VARIABLE, "/another/engine's.json")
    errors.close()
    assert os.environ[CONFIG_VARIABLE] == "/another/engine's.json"
