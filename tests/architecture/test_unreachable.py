"""Code behind a return in its block never runs, and no other check sees it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SUSPECT = re.compile(
    r"^( *)(?:return|raise|continue|break)\b.*\n\1(?!elif\b|else\b|except\b|finally\b|case\b)\w", re.M
)
"""A line that leaves its block, before another at its indentation: few files are worth parsing."""
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def unreachable(text: str) -> list[int]:
    """The lines that leave a block which goes on."""
    if _SUSPECT.search(text) is None:
        return []
    blocks = (
        block
        for node in ast.walk(ast.parse(text))
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list)
    )
    return [each.lineno for block in blocks for each in block[:-1] if isinstance(each, _LEAVES)]


def test_no_statement_follows_a_return() -> None:
    paths = [path for root in ("platform", "router", "workers") for path in (ROOT / root).rglob("*.py")]
    assert paths
    found = {str(path.relative_to(ROOT)): unreachable(path.read_text()) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def f():\n    return {each for each in ()}\n    return {\n    }\n", [2]),
        ("def f():\n    if a:\n        return 1\n    else:\n        return 2\n", []),
        ("def f():\n    if a:\n        return 1\n    return 2\n", []),
    ],
)
def test_it_is_found(text: str, lines: list[int]) -> None:
    assert unreachable(text) == lines
