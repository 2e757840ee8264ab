"""One word per concept: names contain no rejected word of the glossary, and class names are unique."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("platform", "router", "workers")
SECTION = "## Words that are not used"


def rejected_words() -> set[str]:
    page = (ROOT / "docs" / "GLOSSARY.md").read_text()
    listed = page.partition(SECTION)[2].partition("\n\n")[2].partition("\n\n")[2].partition("\n\n")[0]
    return set(re.findall(r"`(\w+)`", listed))


def modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "wire/v1" not in path.as_posix():
                yield path


def words(identifier: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case; `in_flight` is one word."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", identifier.replace("in_flight", "inflight"))
    return [part.lower() for part in parts]


def rejected_names(source: str, rejected: set[str]) -> list[str]:
    """Each name of some code that holds a rejected word, with its line."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and rejected & set(words(token.string)):
            found.append(f"{token.start[0]}: {token.string}")
    return found


def public_classes() -> dict[str, list[str]]:
    defined = defaultdict(list)
    for path in modules(*PRODUCT):
        # The Python twin of a native class has its name.
        if path.name.startswith("_"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path.relative_to(ROOT)))
    return defined


def test_the_glossary_lists_rejected_words() -> None:
    assert {"flight", "elsewhere", "books", "told"} <= rejected_words()


@pytest.mark.parametrize("folder", [*PRODUCT, "load_tests", "tests/kit"])
def test_no_name_holds_a_rejected_word(folder: str) -> None:
    rejected = rejected_words()
    found = {
        str(path.relative_to(ROOT)): names
        for path in modules(folder)
        if (names := rejected_names(path.read_text(), rejected))
    }
    assert not found, f"docs/GLOSSARY.md names the words to use instead: {found}"


def test_each_public_class_name_has_one_meaning() -> None:
    several = {name: paths for name, paths in public_classes().items() if len(paths) > 1}
    assert not several


def test_a_rejected_word_is_found_in_any_form_of_a_name() -> None:
    source = "class BooksSeries: ...\ndef go_straight(flights): ...\nin_flight = wished = 1\n"
    assert rejected_names(source, {"books", "straight", "wished", "flights"}) == [
        "1: BooksSeries",
        "2: go_straight",
        "2: flights",
        "3: wished",
    ]
