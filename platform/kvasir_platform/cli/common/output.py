"""Output of every subcommand: text for people, JSON for programs."""

from __future__ import annotations

import json as json_codec
import os
import sys
from collections.abc import Container, Sequence
from dataclasses import asdict
from typing import TextIO

from kvasir.core.errors import KvasirError, StartError


class CommandOutput:
    """Results go to standard output, errors to standard error; in JSON mode each is one object."""

    def __init__(self, *, json: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.json = json
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal, so that a line may be redrawn."""
        return not self.json and self._out.isatty()

    def text(self, text: str = "") -> None:
        """Print a line; no output in JSON mode."""
        if not self.json:
            self._write(text + "\n")

    def data(self, value: object) -> None:
        """Print a result as one line of JSON; no output in text mode."""
        if self.json:
            self._write(json_codec.dumps(value) + "\n")

    def raw(self, text: str) -> None:
        """Print the output of another process in the same mode, unchanged."""
        self._write(text)

    def redraw(self, text: str) -> None:
        """Replace the current line. Only for terminals."""
        self._write(f"\r\x1b[2K{text}")

    def error(self, error: KvasirError) -> None:
        """Print an error in full."""
        if self.json:
            body: dict[str, object] = {"code": error.code, "message": error.message}
            if isinstance(error, StartError):
                body |= {"remedy": error.remedy, "log": error.log}
            problems = getattr(error, "problems", ())
            if problems:
                body["problems"] = [asdict(problem) for problem in problems]
            self._write(json_codec.dumps({"error": body}) + "\n")
        else:
            self._err.write(f"error: {error.message}\n")
            self._err.flush()

    def note(self, text: str) -> None:
        """Print a remark to standard error, beside what the command prints, in either mode."""
        self._err.write(f"{text}\n")
        self._err.flush()

    def detach(self) -> None:
        """Discard buffered output after the reader has closed its end."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Format a table: columns as wide as their widest cell, those of `numbers` right-aligned, no trailing
    spaces."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: object) -> str:
    """Format a count; "-" for None."""
    return f"{value:,}" if isinstance(value, int) else "-"


def size(count: float) -> str:
    """Format bytes."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def milliseconds(seconds: float | None) -> str:
    """Format a time of a request; "-" for None."""
    if seconds is None:
        return "-"
    if seconds >= 10.0:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.1f} ms"


def duration(seconds: float) -> str:
    """Format seconds."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
