"""A build that cannot compile the router leaves Python in place, and says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REFUSES = 'def mypycify(*_, **__):\n    raise SystemExit("legs.py:7: error: no such type")\n'
BROKEN = """
from setuptools import Extension

def mypycify(*_, **__):
    made = [("fast_path", ""), ("legs", "#error it does not compile")]
    for name, text in made:
        with open(f"{name}.c", "w") as file:
            file.write(text)
    return [
        Extension(f"kvasir_router.{name}", [f"{name}.c"], extra_compile_args=["-Werror"]) for name, _ in made
    ]
"""


@pytest.mark.parametrize(
    ("translator", "why"), [(REFUSES, "legs.py:7: error: no such type"), (BROKEN, "failed")]
)
def test_a_router_that_cannot_be_compiled_runs_as_python(tmp_path: Path, translator: str, why: str) -> None:
    router = tmp_path / "router" / "kvasir_router"
    for folder in (router, tmp_path / "mypyc", tmp_path / "platform", tmp_path / "workers"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "mypyc" / "__init__.py").touch()
    (tmp_path / "mypyc" / "build.py").write_text(translator)
    (router / "legs.py").touch()
    (router / "legs.cpython-311-x86_64-linux-gnu.so").touch()
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    assert "the router runs as Python, which takes longer" in said
    assert why in said
    assert [path.name for path in router.iterdir()] == ["legs.py"]
