"""The router's modules are compiled wherever there is a compiler, and old ones are not taken for their
source."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.kit.suite.builds import ROOT, Builds, stale_builds

from kvasir.compiled import is_compiled
from kvasir_router.admission import AdmissionTicket
from kvasir_router.fleet.decision_entry import DecisionEntry
from kvasir_router.fleet.fleet import TargetLoad
from kvasir_router.requests.state import RequestState

SETUP: dict[str, Any] = {
    node.targets[0].id: ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "setup.py").read_text()).body
    if isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Name)
    and node.targets[0].id in {"COMPILED", "INTERPRETED"}
}
"""What setup.py compiles, which runs when it is imported."""
PATTERNS = (ROOT / SETUP["COMPILED"]).read_text().split()
SOURCES = [
    path.relative_to(ROOT)
    for pattern in PATTERNS
    for path in ROOT.glob(pattern)
    if path.name not in SETUP["INTERPRETED"]
]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_what_runs_for_every_request_is_compiled(pytestconfig: pytest.Config) -> None:
    if stale_builds(pytestconfig):
        pytest.skip("removed, since the source has changed: make install-dev")
    assert is_compiled(), "make install-dev"
    modules = [importlib.import_module(".".join(path.with_suffix("").parts[1:])) for path in SOURCES]
    assert len(modules) > 90
    assert [module.__name__ for module in modules if not str(module.__file__).endswith(".so")] == []


@pytest.mark.parametrize("each", [AdmissionTicket, DecisionEntry, RequestState, TargetLoad])
def test_what_is_made_for_every_request_is_not_made_by_generated_python(each: type) -> None:
    assert "__create_fn__" not in inspect.getattr_static(each, "__init__").__qualname__


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_coroutine_is_compiled_and_no_generator_that_handles_exceptions(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)
    ] == []
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.With)]
    inside = [
        node for each in tries for node in ast.walk(each) if isinstance(node, ast.Yield | ast.YieldFrom)
    ]
    assert [node.lineno for node in inside] == []


NEVER_COMPARED = {
    "AnswerHead",
    "Call",
    "ChatOptions",
    "EmitDelta",
    "FinishRequest",
    "HeldLease",
    "ReleaseOn",
    "RequestArrived",
    "RunningLeg",
    "StepReceived",
    "SubmitTo",
    "TraceContext",
}
"""Values that are compared nowhere in compiled code."""


def test_no_value_that_is_compared_is_defined_where_comparisons_are_compiled() -> None:
    # Compiled code compares objects of a class without __eq__, which it does not know to be generated, by
    # identity. Those of dataclasses, and of classes that are not compiled, it compares as Python does.
    values = {
        node.name
        for path in SOURCES
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(each, ast.Name) and each.id == "value" for each in node.decorator_list)
    }
    assert values == NEVER_COMPARED


def test_every_pattern_of_what_is_compiled_names_a_module() -> None:
    assert [pattern for pattern in PATTERNS if not [*ROOT.glob(pattern)]] == []


def test_make_compiles_again_when_any_of_them_changes() -> None:
    printed = subprocess.run(
        ["make", "--no-print-directory", "--eval", "print: ; @echo $(SOURCES)", "print"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert {str(path) for path in SOURCES} - {*printed.stdout.split()} == set()


def _built(root: Path, name: str, *, source_s: float, built_s: float) -> tuple[Path, Path]:
    source, built = root / f"{name}.py", root / f"{name}.cpython-311-x86_64-linux-gnu.so"
    source.parent.mkdir(parents=True, exist_ok=True)
    for path, at in ((source, source_s), (built, built_s)):
        path.touch()
        os.utime(path, (at, at))
    return source, built


def test_compiled_modules_are_removed_together_once_one_source_is_newer(tmp_path: Path) -> None:
    old = _built(tmp_path, "router/requests/legs", source_s=20.0, built_s=10.0)
    new = _built(tmp_path, "platform/gateway/body", source_s=10.0, built_s=20.0)
    library = tmp_path / "platform" / "compiled__mypyc.cpython-311-x86_64-linux-gnu.so"
    other = tmp_path / "platform" / "_native.cpython-311-x86_64-linux-gnu.so"
    for path in (library, other):
        path.touch()
    builds = Builds(tmp_path)
    assert [path.exists() for path in (*old, *new, library, other)] == [True, False, True, False, False, True]
    assert "before legs changed: make install-dev" in str(builds.pytest_report_header())


def test_compiled_modules_of_unchanged_sources_stay(tmp_path: Path) -> None:
    _, built = _built(tmp_path, "router/legs", source_s=10.0, built_s=10.0)
    (tmp_path / "router" / "compiled__mypyc.cpython-311-x86_64-linux-gnu.so").touch()
    assert Builds(tmp_path).pytest_report_header() is None
    assert built.exists()


def test_no_class_that_stays_python_inherits_from_a_compiled_one() -> None:
    # It could be imported, but not made.
    compiled = {".".join(path.with_suffix("").parts[1:]) for path in SOURCES}
    heirs = [
        f"{path.name}: {heir}"
        for folder in ("platform", "router", "workers", "tests", "load_tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT) not in SOURCES
        for heir in _heirs_of_imported(path.read_text(), compiled)
    ]
    assert heirs == []


def _heirs_of_imported(text: str, modules: set[str]) -> list[str]:
    if not any(f"from {module} import" in text for module in modules):
        return []
    tree = ast.parse(text)
    imported = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for each in node.names
    }
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in imported for base in node.bases)
    ]
