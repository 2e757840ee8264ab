"""Limits on the number of modules in a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 15
ROOTS = ("platform", "router", "workers", "load_tests", "tests/kit")
SUFFIXES = (".py", ".cpp", ".hpp")
GENERATED = ROOT / "platform" / "kvasir" / "wire" / "v1"


def test_no_folder_has_more_than_fifteen_modules() -> None:
    modules = Counter(
        path.parent
        for root in ROOTS
        for path in (ROOT / root).rglob("*")
        if path.suffix in SUFFIXES and path.name != "__init__.py" and path.parent != GENERATED
    )
    assert modules
    assert {str(folder.relative_to(ROOT)): n for folder, n in modules.items() if n > MOST} == {}
