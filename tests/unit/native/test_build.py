"""A build that cannot compile the router leaves Python in place, and says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.suite.builds import stale_modules

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


PROJECT = """
[project]
name = "kvasir"
version = "1"
[tool.setuptools]
packages = ["kvasir_router"]
package-dir = {kvasir_router = "router/kvasir_router"}
"""
WORKS = """
from pathlib import Path
from setuptools import Extension

def mypycify(*_, **__):
    # Like mypyc, it does not write what has not changed.
    if not (source := Path("legs.c")).exists():
        source.write_text("void *PyInit_legs(void) { return 0; }")
    return [Extension("kvasir_router.legs", [str(source)])]
"""


def build(folder: Path, translator: str) -> str:
    """Build a router with one module in an empty folder, or build it again. Return what is said."""
    router = folder / "router" / "kvasir_router"
    listed = folder / "platform" / "kvasir" / "compiled.txt"
    for each in (router, folder / "mypyc", listed.parent, folder / "workers"):
        each.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "setup.py", folder)
    listed.write_text("router/kvasir_router/*.py\n")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "mypyc" / "__init__.py").touch()
    (folder / "mypyc" / "build.py").write_text(translator)
    (router / "legs.py").touch()
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    return said


@pytest.mark.parametrize(
    ("translator", "why"), [(REFUSES, "legs.py:7: error: no such type"), (BROKEN, "failed")]
)
def test_a_router_that_cannot_be_compiled_runs_as_python(tmp_path: Path, translator: str, why: str) -> None:
    router = tmp_path / "router" / "kvasir_router"
    router.mkdir(parents=True)
    (router / "legs.cpython-311-x86_64-linux-gnu.so").touch()
    said = build(tmp_path, translator)
    assert "the router runs as Python, which takes longer" in said
    assert why in said
    assert [path.name for path in router.iterdir()] == ["legs.py"]


def test_a_module_is_not_older_than_its_source_once_it_is_built_again(tmp_path: Path) -> None:
    for _ in range(2):
        # The source is written again, and is compiled to the same.
        build(tmp_path, WORKS)
    router = tmp_path / "router" / "kvasir_router"
    assert len([*router.glob("*.so")]) == 1
    assert stale_modules(tmp_path) == []
