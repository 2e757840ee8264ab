"""The machine from which a cluster is checked: its commands and its clock."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

from load_tests.cluster_checks.findings import CheckError

END_S = 180.0


class CommandError(CheckError):
    """A command that failed. `output` is what it had printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Conversation(Protocol):
    """A command that runs."""

    def line(self) -> str:
        """The next line that it prints, empty if it has ended."""
        ...

    def finish(self) -> str:
        """End its input, and give what it prints until it ends. Raises CommandError."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Tools(Protocol):
    """What checks need of the machine that they run on."""

    def run(self, command: Sequence[str], given: str = "", timeout_s: float = 120.0) -> str:
        """Run a command with an input, and give what it prints. Raises CommandError."""
        ...

    def start(self, command: Sequence[str], first_line: str) -> Conversation:
        """Start a command whose input begins with a line, and stays open."""
        ...

    def now(self) -> float:
        """Seconds."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait."""
        ...


class _Running:
    def __init__(self, process: subprocess.Popen[str], command: str) -> None:
        self._process = process
        self._command = command

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def finish(self) -> str:
        try:
            printed, errors = self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise CommandError(f"{self._command}: did not end within {END_S:.0f} s of its input") from error
        if self._process.returncode:
            raise CommandError(f"{self._command}: {errors.strip()[-1000:]}", printed)
        return printed

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(ValueError, OSError):
            self._process.communicate()


class LocalTools:
    """kubectl and helm as they are installed here."""

    def run(self, command: Sequence[str], given: str = "", timeout_s: float = 120.0) -> str:
        shown = " ".join(command)[:200]
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except FileNotFoundError as error:
            raise CommandError(f"{command[0]} is not installed") from error
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{shown}: not done within {timeout_s:.0f} s") from error
        if done.returncode:
            raise CommandError(f"{shown}: {done.stderr.strip()[-1000:]}", done.stdout)
        return done.stdout

    def start(self, command: Sequence[str], first_line: str) -> Conversation:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert process.stdin is not None
        process.stdin.write(first_line + "\n")
        process.stdin.flush()
        return _Running(process, " ".join(command[:6]))

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
