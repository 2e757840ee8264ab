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
_NAME = re.compile(r"[^\W\d]\w*")
_CLASS = re.compile(r"^class ([^\W_]\w*)", re.MULTILINE)


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
    # Most files hold none, in their comments and texts either, and are not worth tokenizing.
    if not any(rejected & set(words(name)) for name in set(_NAME.findall(source))):
        return []
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
        for name in _CLASS.findall(path.read_text()):
            defined[name].append(str(path.relative_to(ROOT)))
    return defined


def defines(path: str, name: str) -> bool:
    """Whether the class is code of the module, and not in a text."""
    body = ast.parse((ROOT / path).read_text()).body
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in body)


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
    classes = public_classes()
    assert len(classes) > 1000
    several = {name: paths for name, paths in classes.items() if len(paths) > 1}
    assert not {name: paths for name, paths in several.items() if sum(defines(p, name) for p in paths) > 1}


def test_a_rejected_word_is_found_in_any_form_of_a_name() -> None:
    source = "class BooksSeries: ...\ndef go_straight(flights): ...\nin_flight = wished = 1\n"
    assert rejected_names(source, {"books", "straight", "wished", "flights"}) == [
        "1: BooksSeries",
        "2: go_straight",
        "2: flights",
        "3: wished",
    ]
