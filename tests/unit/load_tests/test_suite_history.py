"""What git says of the commits that reports name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from load_tests.suite.history import GitError, History

AUTHOR = ("-c", "user.name=t", "-c", "user.email=t@example.com")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """Commit Python files by their names; return the hash."""
    for name, text in files.items():
        (folder / "code" / f"{name}.py").write_text(text)
    git(folder, "add", ".")
    git(folder, *AUTHOR, "commit", "-q", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "code").mkdir(parents=True)
    git(folder, "init", "-q")
    return folder


def test_lines_that_were_removed_and_added_since_a_commit_are_counted_in_the_named_files(
    repository: Path,
) -> None:
    first = commit(repository, a="1\n2\n3\n", b="1\n")
    commit(repository, a="1\nnew\n3\n4\n", b="other\n")
    history = History(repository)
    assert history.changed_lines(first, ["code/a.py"]) == 3
    assert history.changed_lines(first, ["code/*.py"]) == 5
    assert history.changed_lines(first, ["elsewhere/**"]) == 0
    assert history.lines(["code/*.py"]) == {"code/*.py": 5}


def test_a_moved_file_counts_as_removed_and_added(repository: Path) -> None:
    first = commit(repository, a="1\n2\n")
    git(repository, "mv", "code/a.py", "code/c.py")
    commit(repository)
    assert History(repository).changed_lines(first, ["code/*.py"]) == 4


def test_only_what_came_before_head_is_in_its_history(repository: Path) -> None:
    first = commit(repository, a="1\n")
    replaced = commit(repository, a="2\n")
    git(repository, "reset", "-q", "--hard", first)
    commit(repository, a="3\n")
    history = History(repository)
    assert history.contains(first[:8])
    assert not history.contains(replaced)
    assert not history.contains("0" * 40)
    assert history.committed(first).year >= 2024
    with pytest.raises(GitError):
        history.changed_lines("0" * 40, ["code/*.py"])


def test_each_version_of_a_file_is_found_the_newest_first(repository: Path) -> None:
    commit(repository, a="first\n")
    commit(repository, b="other\n")
    commit(repository, a="second\n")
    history = History(repository)
    assert history.versions("code/a.py") == ["second\n", "first\n"]
    assert history.versions("code/never.py") == []


def test_a_shallow_clone_and_a_folder_without_git_have_no_whole_history(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository, a="1\n")
    commit(repository, a="2\n")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", "shallow")
    (tmp_path / "bare").mkdir()
    assert History(repository).whole()
    assert not History(tmp_path / "shallow").whole()
    assert not History(tmp_path / "bare").whole()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not History(repository).whole()
