"""What git knows of the commits that reports name. The only module of this package that runs git."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LONGEST_S = 60.0


class GitError(RuntimeError):
    """Git does not answer."""


class History:
    """The history of HEAD in the checkout `root`."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def whole(self) -> bool:
        """Whether the checkout is one of git, with all commits before HEAD, and git is installed."""
        try:
            done = self._run("rev-parse", "--is-shallow-repository")
        except GitError:
            return False
        return done.returncode == 0 and done.stdout.strip() == "false"

    def head(self) -> str:
        """The abbreviated hash of HEAD. Raise GitError."""
        return self._said("rev-parse", "--short", "HEAD").strip()

    def contains(self, commit: str) -> bool:
        """Whether the commit is HEAD or before it."""
        return self._run("merge-base", "--is-ancestor", f"{commit}^{{commit}}", "HEAD").returncode == 0

    def committed(self, commit: str) -> datetime:
        """When the commit was made. Raise GitError if there is none."""
        seconds = int(self._said("log", "-1", "--format=%ct", f"{commit}^{{commit}}"))
        return datetime.fromtimestamp(seconds, UTC)

    def changed_lines(self, commit: str, globs: Sequence[str]) -> int:
        """The lines, removed and added together, that differ between the commit and HEAD in files under these
        globs. A file that was moved counts as removed and added. Raise GitError."""
        paths = [f":(top,glob){each}" for each in globs]
        text = self._said("diff", "--no-renames", "--numstat", commit, "HEAD", "--", *paths)
        counts = [line.split("\t")[:2] for line in text.splitlines()]
        # A binary file has dashes.
        return sum(int(each) for pair in counts for each in pair if each.isdigit())

    def lines(self, globs: Sequence[str]) -> dict[str, int]:
        """The lines of files at HEAD by glob. Raise GitError."""
        empty = self._said("hash-object", "-t", "tree", "/dev/null").strip()
        return {each: self.changed_lines(empty, [each]) for each in globs}

    def versions(self, path: str) -> list[str]:
        """The text of the file after each commit that added or changed it, the newest first. Raise
        GitError."""
        changed = self._said("log", "--diff-filter=AM", "--format=%H", "--", path).split()
        return [self._said("show", f"{commit}:{path}") for commit in changed]

    def _said(self, *arguments: str) -> str:
        done = self._run(*arguments)
        if done.returncode:
            raise GitError(f"git {' '.join(arguments[:2])}: {done.stderr.strip()[:300]}")
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["git", *arguments],
                cwd=self._root,
                capture_output=True,
                text=True,
                check=False,
                timeout=_LONGEST_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GitError(f"git {arguments[0]}: {error}") from error
