"""Runs the suites of client frameworks in an environment with the packages of requirements/frameworks.lock,
and reads what became of each test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.kit.suite.pip import install_locked

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "requirements" / "frameworks.lock"
SUITES = ROOT / "tests" / "e2e" / "frameworks" / "suites"
_VENV = ROOT / "build" / "frameworks"
_TIMEOUT_S = 900
_API_ERROR = re.compile(
    r"\b(BadRequestError|UnprocessableEntityError|InternalServerError|NotFoundError|APIStatusError|"
    r"APIConnectionError|ModelHTTPError|AuthenticationError|RateLimitError)\b"
)
"""What clients raise for an answer that is an error, whatever the model said."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A file of tests, the framework that it drives, and the package with its version."""

    file: str
    framework: str
    package: str


ALL = (
    Suite("suite_langchain_openai.py", "LangChain, standard tests, OpenAI", "langchain-openai"),
    Suite("suite_langchain_anthropic.py", "LangChain, standard tests, Anthropic", "langchain-anthropic"),
    Suite("suite_openai_agents.py", "OpenAI Agents SDK", "openai-agents"),
    Suite("suite_pydantic_ai.py", "Pydantic AI", "pydantic-ai-slim"),
    Suite("suite_litellm.py", "LiteLLM", "litellm"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the tests of a suite: how many passed, why others were skipped, and the names of those
    that failed, apart by whether the server answered with an error."""

    passed: int
    skipped: tuple[str, ...]
    refused: tuple[str, ...]
    failed: tuple[str, ...]


def install() -> Path:
    """Return the Python with the packages of the lock, which are installed on first use and when it changes.
    Raises CalledProcessError if the registry lacks one."""
    python, stamp = _VENV / "bin" / "python", _VENV / "lock"
    lock = LOCK.read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(_VENV)], check=True)
        install_locked(LOCK, python=python)
        stamp.write_text(lock)
    return python


def run(python: Path, suite: Suite, url: str, model: str) -> Outcome:
    """Run a suite against a gateway. Raises RuntimeError if pytest itself fails."""
    with tempfile.TemporaryDirectory(prefix="kvasir-frameworks-") as folder:
        results = Path(folder) / "results.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--rootdir", str(SUITES), "--confcutdir", str(SUITES), "--junitxml", str(results)]
        # Clients keep their connections in the loop that opened them.
        command += [
            "-o",
            "asyncio_mode=auto",
            "-o",
            "asyncio_default_test_loop_scope=session",
            "-W",
            "ignore",
        ]
        command += [str(SUITES / suite.file)]
        environment = {**os.environ, "KVASIR_URL": url, "KVASIR_MODEL": model, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if not results.exists():
            raise RuntimeError(f"{suite.file} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return outcome(results.read_text())


def outcome(results: str) -> Outcome:
    """Return the outcome in pytest's JUnit XML."""
    passed, skipped, refused, failed = 0, [], [], []
    for case in ElementTree.fromstring(results).iter("testcase"):
        why = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if why is None:
            passed += 1
        elif why.tag == "skipped":
            skipped.append(_reason(why.get("message", "")))
        elif _API_ERROR.search(f"{why.get('message', '')}\n{why.text or ''}"):
            refused.append(name)
        else:
            failed.append(name)
    return Outcome(passed, tuple(skipped), tuple(refused), tuple(failed))


def version(package: str, lock: str) -> str:
    """Return the version of a package in the text of a lock. Raises LookupError."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock, re.MULTILINE)
    if found is None:
        raise LookupError(f"{package} is not in the lock")
    return found[1]


def reasons(skipped: Iterable[str]) -> str:
    """Return why tests were skipped, each reason once."""
    return "; ".join(sorted(set(skipped)))


def _reason(message: str) -> str:
    return message.removeprefix("Skipped: ").strip().rstrip(".")
