"""Loads kvasir.yaml and `--set` options into one validated Deployment, or reports all problems.

Pydantic validates in strict JSON mode (text is not a number, `true` is not 1). This module maps each finding
to the line and column of its value, describes it in terms of the schema, and suggests the nearest known field
for an unknown one.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kvasir.config.checks.problems import Problem, SpecError, Value
from kvasir.config.load.yaml_document import (
    Document,
    FieldPath,
    Position,
    dotted,
    parse,
    read_file,
    shorten,
)
from kvasir.config.spec.base import Spec
from kvasir.config.spec.deployment import Deployment

_Spec = TypeVar("_Spec", bound=Spec)

_CREDENTIALS = re.compile(r'(://)[^\s"]*@')
"""Credentials in a URL. Such URLs are rejected, and errors show rejected values without credentials."""
_MANY = 40
"""Names of fields up to which an error lists all of them."""
_SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Deployment:
    """Return the deployment in the file `path`, or the embedded default if None.

    `overrides` are `key.path=value` texts, applied in order. The value is YAML; a list item is addressed by
    its index or its `name` (`pools.decode.replicas=2`). Raises SpecError (a ConfigError) with all problems.
    """
    if path is None:
        return loads("", "(default)", overrides)
    return loads(read_file(path), str(path), overrides)


def loads(text: str, source: str, overrides: Sequence[str] = ()) -> Deployment:
    """Like `load`, from text; errors name it `source`."""
    document = parse(text, source)
    if document.data is None:
        document.data = {}
    problems: list[Problem] = []
    if overrides and isinstance(document.data, dict):
        defaults = _defaults(document, overrides)
        for option in overrides:
            problems.extend(_override(document, option, defaults))
    if problems:
        raise SpecError(problems)
    return validated(Deployment, document, source)


def validated(kind: type[_Spec], document: Document, source: str) -> _Spec:
    """Return the data of a document as `kind`. Raises SpecError with all problems and their positions."""
    try:
        return kind.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        raise SpecError(_problems(error, document, source, _json_schema(kind))) from error


def schema() -> dict[str, Any]:
    """Return the JSON schema of the spec (draft 2020-12), for editors and for the chart's values."""
    return {"$schema": _SCHEMA_ID, **_json_schema(Deployment)}


@cache
def _json_schema(kind: type[Spec]) -> dict[str, Any]:
    return kind.model_json_schema()


def dump(deployment: Deployment) -> str:
    """Return the deployment as JSON, which is also YAML: `loads` returns an equal value."""
    return deployment.model_dump_json(indent=2)


def _defaults(document: Document, overrides: Sequence[str]) -> Value:
    """Return the default of every field. That of `pools` follows `disaggregation`, unless an option names
    another pool."""
    chosen = document.data.get("disaggregation") if isinstance(document.data, dict) else None
    deployment = Deployment()
    apart = {pool.name for pool in deployment.pools}
    for option in overrides:
        key, _, text = option.partition("=")
        field, *rest = key.strip().split(".")
        if field == "disaggregation" and not rest:
            chosen = parse(text, option).data
        elif field == "pools" and rest and rest[0] in apart:
            break
    else:
        deployment = Deployment(disaggregation="never") if chosen == "never" else deployment
    data: Value = json.loads(deployment.model_dump_json())
    return data


def _override(document: Document, option: str, defaults: Value) -> list[Problem]:
    """Apply one `key.path=value` to the document in place and return its problems."""
    source = f"--set {option}"
    key, equals, text = option.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return [Problem(source, found=repr(option), expected="key.path=value")]
    value = parse(text, source).data
    target: Value = document.data
    path: FieldPath = ()
    for part in parts[:-1]:
        step = _step(target, part)
        if isinstance(step, Problem):
            return [Problem(source, field=dotted(path), found=step.found, expected=step.expected)]
        child = _child(target, step)
        defaults = _child(defaults, step)
        if not isinstance(child, dict | list):
            child = copy.deepcopy(defaults) if isinstance(defaults, list) else {}
            _assign(target, step, child)
        target, path = child, (*path, step)
    last = _step(target, parts[-1])
    if isinstance(last, Problem):
        return [Problem(source, field=dotted(path), found=last.found, expected=last.expected)]
    _assign(target, last, value)
    path = (*path, last)
    for places in (document.keys, document.values):
        for inner in [p for p in places if p[: len(path)] == path]:
            del places[inner]
        places[path] = Position(source)
    return []


def _step(container: Value, part: str) -> str | int | Problem:
    """Return how `part` of a `--set` key addresses `container`: by index, by name in a list, or by field."""
    if not isinstance(container, list):
        return part
    if part.isdecimal() and int(part) < len(container):
        return int(part)
    names = [item.get("name") if isinstance(item, dict) else None for item in container]
    if part in names:
        return names.index(part)
    known = ", ".join([str(name) for name in names if name] or ["nothing"])
    return Problem("", found=repr(part), expected=f"an index below {len(container)} or one of: {known}")


def _child(container: Value, step: str | int) -> Value:
    if isinstance(container, list) and isinstance(step, int) and step < len(container):
        return container[step]
    if isinstance(container, dict) and isinstance(step, str):
        return container.get(step)
    return None


def _assign(container: Value, step: str | int, value: Value) -> None:
    match container, step:
        case list(), int():
            container[step] = value
        case dict(), str():
            container[step] = value


def _problems(error: ValidationError, document: Document, source: str, root: dict[str, Any]) -> list[Problem]:
    """Return pydantic's findings with their positions, in terms of the schema."""
    # A default that follows another field is not made if that field is wrong.
    findings = [
        finding
        for finding in error.errors(include_url=False)
        if finding["type"] != "default_factory_not_called"
    ]
    problems = []
    for finding in findings:
        path = tuple(finding["loc"])
        deeper = any(len(f["loc"]) > len(path) and f["loc"][: len(path)] == path for f in findings)
        if finding["type"] == "too_short" and deeper:
            continue  # pydantic counts only the valid items; the invalid ones are reported themselves
        if finding["type"] != "extra_forbidden":
            path = _in_schema(path, root)
        path, found, expected = _explain(path, dict(finding), root)
        at = _position(document, path, source, of_key=finding["type"] == "extra_forbidden")
        problem = Problem(at.source, at.line, at.column, dotted(path), found, expected)
        if problem not in problems:
            problems.append(problem)
    return problems


def _in_schema(path: FieldPath, root: dict[str, Any]) -> FieldPath:
    """Return `path` without what pydantic appends to it for an alternative of a union, such as `str`."""
    while path and not _schema_at(root, path):
        path = path[:-1]
    return path


def _explain(path: FieldPath, finding: Mapping[str, Any], root: dict[str, Any]) -> tuple[FieldPath, str, str]:
    """Return (path, found, expected) for one finding. A validator's message can extend the path."""
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        fields = _fields(_schema_at(root, path[:-1]))
        return path, f"unknown field {str(path[-1])!r}", _nearest(str(path[-1]), fields)
    if kind == "missing":
        return path, "nothing", _describe(_schema_at(root, path))
    if kind == "value_error":
        message = str(finding["ctx"]["error"])
        # The message of a validator over several fields starts with the name of the field to correct.
        word = message.split(maxsplit=1)[0].rstrip(":")
        sharper = (*path, word) if word in _fields(_schema_at(root, path)) else path
        inner = value.get(word) if isinstance(value, dict) and sharper != path else value
        missing = sharper != path and isinstance(value, dict) and word not in value
        return sharper, "nothing (the default)" if missing else _show(inner), message
    return path, _show(value), _describe(_schema_at(root, path)) or finding["msg"]


def _position(document: Document, path: FieldPath, source: str, *, of_key: bool) -> Position:
    """Return the position of the deepest part of `path` that is in the document."""
    if of_key and path in document.keys:
        return document.keys[path]
    for length in range(len(path), -1, -1):
        if path[:length] in document.values:
            exact = length == len(path) or path[:length] not in document.keys
            return (document.values if exact else document.keys)[path[:length]]
    return Position(source)


def _schema_at(root: dict[str, Any], path: FieldPath) -> dict[str, Any]:
    """Return the schema node of a field, with references and `null` alternatives resolved; {} if unknown."""
    node = _resolve(root, root)
    for part in path:
        inner = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        inner = node.get("additionalProperties") if inner is None else inner
        if not isinstance(inner, dict):
            return {}
        node = _resolve(root, inner)
    return node


def _resolve(root: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    alternatives = [a for a in node.get("anyOf", []) if a.get("type") != "null"]
    if len(alternatives) == 1:
        node = {k: v for k, v in node.items() if k != "anyOf"} | alternatives[0]
    if "$ref" in node:
        target = root["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        node = target | {k: v for k, v in node.items() if k != "$ref"}
    return node


def _fields(node: Mapping[str, Any]) -> list[str]:
    return list(node.get("properties", ()))


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    if len(known) <= _MANY:
        return f"{close[0]!r}, perhaps" if close else "one of: " + ", ".join(known)
    near = close or [each for each in known if name.lower() in each][:3]
    if not near:
        return f"one of {len(known)} names, as in docs/kvasir.schema.json"
    return f"{' or '.join(map(repr, near))}, perhaps"


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping of fields",
}


def _describe(node: Mapping[str, Any]) -> str:
    """Describe a schema node: its type, bounds, choices or pattern; "" if it has none."""
    if "enum" in node:
        return "one of: " + ", ".join(str(choice) for choice in node["enum"])
    if "const" in node:
        return str(node["const"])
    if "anyOf" in node:
        return " or ".join(filter(None, (_describe(each) for each in node["anyOf"])))
    words = _KINDS.get(node.get("type", ""), "")
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        words += f" from {low} to {high}"
    else:
        bounds = [
            f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"
            for word, bound in (("at least", low), ("above", above), ("at most", high), ("below", below))
            if bound is not None
        ]
        words += f" {' and '.join(bounds)}" if bounds else ""
    if "pattern" in node:
        words += f" that matches {node['pattern']}"
    if "maxLength" in node:
        words += f", at most {node['maxLength']} characters"
    if "minItems" in node:
        words += f" of at least {node['minItems']}"
    return words


def _show(value: object) -> str:
    """Return a value as in YAML, with its type if it is ambiguous."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = shorten(_CREDENTIALS.sub(r"\1…@", json.dumps(value, ensure_ascii=False)))
    return f"{text} (text)" if isinstance(value, str) else text
