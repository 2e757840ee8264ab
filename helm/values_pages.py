"""Makes the chart's values.schema.json and the table in its README.md, so that neither can say something else
than values.yaml and the deployment spec do:

    python helm/values_pages.py            # write both
    python helm/values_pages.py --check    # fail where one of them is not what it should be

In values.yaml the comment above a key is its documentation. A line of it that begins with `@schema` is a
piece of JSON schema in YAML, for what a default cannot show. `{id: NAME}` there names the schema of a
mapping, for others to refer to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from kvasir.config.load.loader import schema as spec_schema

CHART = Path(__file__).resolve().parent / "kvasir"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
MARK = "@schema"
SHOWN = 60

Schema = dict[str, Any]


@dataclass(slots=True)
class Entry:
    """One key of values.yaml. `fields` are the keys of a mapping, None for anything else."""

    path: str
    default: Any
    text: str
    given: Schema
    fields: list[Entry] | None = field(default=None)

    def schema(self, named: dict[str, Schema]) -> Schema:
        """What may be set here; schemas with an `id` are added to `named`."""
        given = dict(self.given)
        name = given.pop("id", None)
        made: Schema = {"description": self.text} if self.text else {}
        if "$ref" in given:
            return made | given
        if self.fields and "additionalProperties" not in given:
            made |= {"type": "object", "additionalProperties": False}
            made["properties"] = {each.path.rpartition(".")[2]: each.schema(named) for each in self.fields}
        elif "type" not in given:
            made["type"] = _type(self.default)
        made |= given
        if name is not None:
            named[name] = made
        return made

    def rows(self) -> Iterator[Entry]:
        """Itself and all keys below it that have something to say."""
        if self.text or not self.fields:
            yield self
        if "$ref" in self.given or "additionalProperties" in self.given:
            return
        for each in self.fields or ():
            yield from each.rows()


def read_values(text: str) -> list[Entry]:
    """The keys of values.yaml. Raises ValueError for what is no mapping, a `@schema` included."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("values.yaml is no mapping")
    return list(_entries(node, text.splitlines(), ""))


def values_schema(entries: list[Entry]) -> Schema:
    """The whole of values.schema.json."""
    spec = spec_schema()
    named: dict[str, Schema] = dict(spec.pop("$defs"))
    draft = spec.pop("$schema")
    # The schema of a spec is for editors too; what is unset in a chart's values is not there at all.
    named["Deployment"] = spec
    properties = {each.path: each.schema(named) for each in entries}
    # Helm hands values of parent charts down under this name.
    properties["global"] = {"type": "object"}
    return {
        "$schema": draft,
        "title": "Values of the chart kvasir",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": named,
    }


def table(entries: list[Entry]) -> str:
    """The README's table of values."""
    lines = ["| value | default | what it is |", "|---|---|---|"]
    for top in entries:
        for each in top.rows():
            default = "" if each.fields else f"`{_short(each.default)}`"
            lines.append(f"| `{each.path}` | {default} | {each.text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """What both files should say."""
    entries = read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    readme = CHART / "README.md"
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} lacks {BEGIN} or {END}")
    return {
        CHART / "values.schema.json": json.dumps(values_schema(entries), indent=2) + "\n",
        readme: f"{before}{BEGIN}\n{table(entries)}\n{END}{after}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a file differs")
    args = parser.parse_args(argv)
    differing = []
    for path, text in pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        differing.append(path)
        if not args.check:
            path.write_text(text, encoding="utf-8")
    for path in differing:
        sys.stdout.write(f"{'differs' if args.check else 'written'}: {path.relative_to(CHART.parent)}\n")
    return 1 if args.check and differing else 0


def _entries(node: yaml.MappingNode, lines: list[str], above: str) -> Iterator[Entry]:
    for key, value in node.value:
        path = f"{above}.{key.value}" if above else key.value
        text, given = _comment(lines, key.start_mark.line, path)
        default = SafeConstructor().construct_document(value)
        fields = list(_entries(value, lines, path)) if isinstance(value, yaml.MappingNode) else None
        yield Entry(path, default, text, given, fields)


def _comment(lines: list[str], line: int, path: str) -> tuple[str, Schema]:
    """The text and the schema in the comment that ends above a line."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    words, given = [], Schema()
    for each in lines[first:line]:
        told = each.strip().removeprefix("#").strip()
        if told.startswith(MARK):
            read = yaml.safe_load(told.removeprefix(MARK))
            if not isinstance(read, dict):
                raise ValueError(f"{path}: {told} is no mapping")
            given |= read
        else:
            words.append(told)
    return " ".join(words), given


def _type(default: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(default)]


def _short(default: Any) -> str:
    text = json.dumps(default, ensure_ascii=False)
    return text if len(text) <= SHOWN else "see values.yaml"


if __name__ == "__main__":
    sys.exit(main())
