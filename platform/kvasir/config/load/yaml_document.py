"""Parses YAML into plain data with the position of each part.

Validation errors name a field, and users need its line. The text is composed into YAML's node tree and
converted to plain data with the position of every node. The same pass enforces limits on size, depth and
number of values with aliases expanded, so that nested anchors cannot multiply. Scalars follow the core schema
of YAML 1.2: `on`, `off` and `12:30` are text, and only `true` and `false` are booleans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from kvasir.config.checks.problems import Problem, SpecError, Value

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000

FieldPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a value. `source` is a file or a `--set` option; line and column count from 1, and are
    0 if the source has none."""

    source: str
    line: int = 0
    column: int = 0


@dataclass(slots=True)
class Document:
    """Plain data, and the positions of each key (or sequence item) and each value by path."""

    data: Value
    keys: dict[FieldPath, Position] = field(default_factory=dict)
    values: dict[FieldPath, Position] = field(default_factory=dict)


class _Composer(yaml.SafeLoader):
    """Builds nodes only, and rejects deep nesting before Python's recursion limit is reached."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MAX_DEPTH} levels of nesting", self.get_mark()
            )
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_Composer.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    _Composer.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), _first)


def read_file(path: Path) -> str:
    """Return the text of a file. Raises SpecError if it cannot be read, is too long, or is not UTF-8."""
    name = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError([Problem(name, found="no such file", expected="a kvasir.yaml")]) from error
    except IsADirectoryError as error:
        raise SpecError([Problem(name, found="a folder", expected="a file")]) from error
    except OSError as error:
        found = error.strerror or str(error)
        raise SpecError([Problem(name, found=found, expected="a readable file")]) from error
    if len(raw) > MAX_BYTES:
        limit = f"at most {MAX_BYTES // 1024} KiB"
        raise SpecError([Problem(name, found="a larger file", expected=limit)])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        found = f"byte 0x{raw[error.start]:02x}"
        raise SpecError([Problem(name, line, column, found=found, expected="UTF-8 text")]) from error


def parse(text: str, source: str) -> Document:
    """Parse one YAML document; errors name it `source`. The data of an empty document is None.

    Raises SpecError with all duplicate keys and unsupported tags, or with the first syntax error.
    """
    loader: _Composer | None = None
    try:
        loader = _Composer(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise SpecError([_syntax_problem(error, source)]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        found = f"control character #x{ord(text[error.position]):02x}"
        raise SpecError([Problem(source, line, column, found=found, expected="printable text")]) from error
    finally:
        if loader is not None:
            loader.dispose()
    document = Document(None)
    if root is not None:
        walk = _Walk(source, document)
        document.data = walk.value(root, ())
        if walk.problems:
            raise SpecError(walk.problems)
    return document


def render(data: Value) -> str:
    """Return data as YAML that `parse` can read, in the given order."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def _syntax_problem(error: yaml.MarkedYAMLError, source: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    found = error.problem or "text that cannot be parsed"
    if error.context:
        found = f"{found} ({error.context})"
    if "expected a single document" in found:
        return Problem(source, line, column, found="a second document", expected="one YAML document")
    return Problem(source, line, column, found=found, expected="valid YAML")


def _integer(text: str) -> Value:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text, 10)


def _finite(text: str) -> Value:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_SCALARS: dict[str, Callable[[str], Value]] = {
    "str": str,
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": _finite,
}


class _Walk:
    """One pass over the node tree. State: the problems found, and the number of values."""

    def __init__(self, source: str, document: Document) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._document = document
        self._values = 0

    def value(self, node: Node, path: FieldPath) -> Value:
        self._values += 1
        position = self._position(node)
        self._document.values[path] = position
        if self._values > MAX_VALUES or len(path) > MAX_DEPTH:
            expected = f"at most {MAX_VALUES} values, {MAX_DEPTH} levels deep, with aliases expanded"
            problem = Problem(
                self._source, position.line, position.column, found="a larger document", expected=expected
            )
            raise SpecError([*self.problems, problem])
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return self._sequence(node, path)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self._foreign_tag(node, path)
        return None

    def _sequence(self, node: SequenceNode, path: FieldPath) -> Value:
        items: list[Value] = []
        for index, item in enumerate(node.value):
            self._document.keys[(*path, index)] = self._position(item)
            items.append(self.value(item, (*path, index)))
        return items

    def _mapping(self, node: MappingNode, path: FieldPath) -> Value:
        data: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for key_node, value_node in node.value:
            position = self._position(key_node)
            if key_node.tag == _TAG + "merge":
                merged |= self._merge(value_node, path)
                continue
            if not isinstance(key_node, ScalarNode):
                self._problem(position, path, "a list or mapping as a key", "a field name")
                continue
            key = str(key_node.value)
            if key in data:
                first = self._document.keys[(*path, key)].line
                self._problem(position, (*path, key), f"the key again, first on line {first}", "one value")
                continue
            self._document.keys[(*path, key)] = position
            data[key] = self.value(value_node, (*path, key))
        return merged | data

    def _merge(self, node: Node, path: FieldPath) -> dict[str, Value]:
        """Handle `<<`: keys of the mapping itself take precedence over merged ones, as in YAML 1.1."""
        merged: dict[str, Value] = {}
        sources = reversed(node.value) if isinstance(node, SequenceNode) else [node]
        for source in sources:
            value = self.value(source, path)
            if isinstance(value, dict):
                merged |= value
            else:
                self._problem(self._position(source), path, "`<<` on something else", "`<<: *a_mapping`")
        return merged

    def _scalar(self, node: ScalarNode, path: FieldPath) -> Value:
        kind = node.tag.removeprefix(_TAG)
        convert = _SCALARS.get(kind)
        if convert is None:
            self._foreign_tag(node, path)
            return None
        try:
            return convert(node.value)
        except ValueError:
            self._problem(
                self._position(node), path, shorten(node.value), f"a value that fits its tag !!{kind}"
            )
            return None

    def _foreign_tag(self, node: Node, path: FieldPath) -> None:
        self._problem(self._position(node), path, f"the tag {node.tag}", "plain YAML without tags")

    def _problem(self, at: Position, path: FieldPath, found: str, expected: str) -> None:
        self.problems.append(
            Problem(at.source, at.line, at.column, field=dotted(path), found=found, expected=expected)
        )

    def _position(self, node: Node) -> Position:
        return Position(self._source, node.start_mark.line + 1, node.start_mark.column + 1)


def dotted(path: FieldPath) -> str:
    """Return a path as `pools[0].engine.block_size`; "" for the whole document."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shorten(text: str, limit: int = 60) -> str:
    """Return `text` on one line, truncated to `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
