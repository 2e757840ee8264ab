"""What is right in an answer of `kvasir-tiny` to a case of tiny_tools.

Why this exists: the same verdicts serve the training script and whoever asks a served model.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tiny_tools import Case

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
Calls = list[tuple[str, dict[str, Any]]]


def calls_in(text: str) -> Calls | None:
    """The calls of an answer; None where one cannot be read."""
    found: Calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            found.append((call["name"], dict(call["arguments"])))
        except (ValueError, KeyError, TypeError):
            return None
    return found if "<tool_call>" not in _CALL.sub("", text) else None


def valid(given: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether arguments follow a schema of tiny_tools."""
    known = schema["properties"]
    return set(schema.get("required", [])) <= set(given) <= set(known) and all(
        isinstance(value, _TYPES[known[key]["type"]]) and value in known[key].get("enum", [value])
        for key, value in given.items()
    )


def judge(case: Case, said: str) -> dict[str, bool]:
    """What is right in an answer: `tool` (the tools called), `valid` (the form) and `all`."""
    if case.kind.startswith("json"):
        try:
            read = json.loads(said)
        except ValueError:
            return {"tool": True, "valid": False, "all": False}
        wanted = json.loads(case.answer.removesuffix("<|end|>"))
        return {
            "tool": True,
            "valid": isinstance(read, dict) and set(read) == set(wanted),
            "all": read == wanted,
        }
    calls = calls_in(said)
    if case.kind in ("none", "result"):
        plain = calls == []
        answer = case.answer.removesuffix("<|end|>")
        return {"tool": plain, "valid": plain, "all": plain and (case.kind == "none" or said == answer)}
    if calls is None:
        return {"tool": False, "valid": False, "all": False}
    schemas = {tool.name: tool.schema for tool in case.tools}
    sort = {"key": repr}
    return {
        "tool": sorted(name for name, _ in calls) == sorted(name for name, _ in case.calls),
        "valid": bool(calls)
        and all(name in schemas and valid(given, schemas[name]) for name, given in calls),
        "all": sorted(calls, **sort) == sorted(case.calls, **sort),
    }
