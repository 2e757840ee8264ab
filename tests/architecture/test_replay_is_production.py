"""Trace replays use the product's own modules for decisions, so that their figures hold for the product."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPLAY = ROOT / "platform" / "kvasir_platform" / "sim" / "replay"
PRODUCTION = {
    "kvasir_router.fleet.fleet": {"Fleet"},
    "kvasir_router.index": {"FleetIndex"},
    "kvasir_router.decide": {"RateBook"},
}


def imports(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def test_the_replay_decides_with_the_modules_that_the_router_is_built_of() -> None:
    replay, router = imports(REPLAY / "replay.py"), imports(ROOT / "router" / "kvasir_router" / "build.py")
    for module, names in PRODUCTION.items():
        assert names <= replay.get(module, set())
        assert names <= router.get(module, set())


def test_the_replay_has_no_index_accounts_or_policy_of_its_own() -> None:
    production = set().union(*PRODUCTION.values())
    for path in REPLAY.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & production, f"{path.name}: {node.name}"
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assert not methods & {"decide", "match", "predict"}, f"{path.name}: {node.name}"
