"""The Makefile has help texts, and every target works from a bare checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments: str) -> str:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def targets() -> set[str]:
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    return set(phony.group(1).replace("\\", "").split())


def test_help_is_the_default_and_lists_every_target() -> None:
    text = make()
    assert text == make("help")
    listed = set(re.findall(r"^  make ([a-z-]+) ", text, re.MULTILINE))
    assert listed == targets()


def test_all_named_targets_exist() -> None:
    wanted = {"up", "down", "test", "test-fast", "lint", "types", "arch", "lock", "proto", "fmt", "clean"}
    assert wanted | {"bench-foundation", "install", "help"} <= targets()


def test_every_target_can_be_planned_on_a_machine_without_an_environment(tmp_path: Path) -> None:
    for target in sorted(targets()):
        make("--dry-run", f"VENV={tmp_path}/venv", target)


def test_the_gpu_environment_comes_from_the_gpu_lock(tmp_path: Path) -> None:
    plan = make("--dry-run", f"VENV={tmp_path}/venv", "EXTRA=gpu", "up")
    assert "-r requirements/gpu.lock" in plan
    assert "download.pytorch.org" not in plan


def test_an_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", f"VENV={tmp_path}/venv", f"PYTHON={old}", "install"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Python 3.9.2 is too old: Kvasir needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()
