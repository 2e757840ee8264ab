"""The tools of a chat, and how the output is parsed for calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvasir.core.requests import OutputParsing
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.grammars.checks import judge_schema, new_meter
from kvasir_platform.gateway.openai.schema.chat import ChatBody, Function, NamedFunction, NamedTool, Tool
from kvasir_platform.gateway.openai.schema.limits import (
    MAX_TOOL_BYTES,
    bad,
    check_depth,
    check_references,
    check_size,
    unsupported,
)
from kvasir_platform.gateway.openai.structured import check_cost

TemplateTool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """A chat's tools, in the form of templates and parsers. `choice` is none, auto, required, or function,
    whose name is then in `function`. `legacy`: they were sent as `functions`, and calls are returned in that
    form. `param` is their field."""

    tools: tuple[TemplateTool, ...] = ()
    choice: str = "none"
    function: str = ""
    legacy: bool = False
    param: str = "tools"

    @property
    def forced(self) -> bool:
        """Whether a call is required."""
        return self.choice in ("required", "function")

    @property
    def called(self) -> bool:
        """Whether calls are allowed."""
        return bool(self.tools) and self.choice != "none"


_NO_TOOLS = Toolbox()
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OTHER_TYPES = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const"}
"""Keywords of a schema by which it may describe an object without `type`."""


def toolbox(body: ChatBody, capabilities: ModelCapabilities) -> Toolbox:
    """Return the tools of a chat. Raise RequestError for tools that are too large or have the same name, for
    a choice that is not among them, and where workers cannot parse calls: forced calls follow a grammar,
    others need a parser."""
    if not (body.tools or body.tool_choice or body.functions or body.function_call):
        return _NO_TOOLS
    if body.functions or body.function_call:
        box = _legacy(body)
    else:
        choice, name = _choice(body.tool_choice, bool(body.tools))
        box = Toolbox(template_tools(body.tools or ()), choice, name)
    if box.forced and not box.tools:
        raise bad(f"{_choice_param(box)} needs {box.param}.", _choice_param(box))
    if box.function and box.function not in {tool["function"]["name"] for tool in box.tools}:
        raise bad(f"{box.param} has no function {box.function!r}.", _choice_param(box))
    if box.called and not box.forced and not capabilities.tools:
        raise unsupported(
            box.param,
            f"{box.param} that the model may call or not need engine.tool_parser, which knows the form of "
            f"its calls: set it for the pools of {body.model!r}, or name a function in {_choice_param(box)}.",
        )
    if box.called:
        _check_costs(box)
    return box


def _check_costs(box: Toolbox) -> None:
    """Raise RequestError if the arguments of tools follow a grammar that is too costly to match."""
    meter = new_meter()
    for i, tool in enumerate(box.tools):
        if box.forced or tool["function"].get("strict"):
            check_cost(judge_schema, tool["function"]["parameters"], meter, f"{box.param}[{i}]")


def template_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[TemplateTool, ...]:
    """Return `tools` in the form of vLLM's chat templates. Raise RequestError for tools that are too large
    and for duplicate names."""
    return _shown([tool.function for tool in tools], param, ".function")


def parsing(
    box: Toolbox, body: ChatBody, template_kwargs: Mapping[str, Any], capabilities: ModelCapabilities
) -> OutputParsing | None:
    """Return how to parse the output; None if its text is the content, so that no parsing is needed. Raise
    RequestError if a call is required of a tool whose parameters are no object."""
    if not box.called and not capabilities.reasoning:
        return None
    return OutputParsing(
        tools=msgspec.json.encode(_enforced(box)).decode() if box.called else "",
        tool_choice=box.choice,
        function=box.function,
        parallel_tool_calls=body.parallel_tool_calls is not False and not box.legacy,
        reasoning=body.include_reasoning is not False,
        template_kwargs=msgspec.json.encode(template_kwargs).decode() if template_kwargs else "",
    )


def _enforced(box: Toolbox) -> Sequence[TemplateTool]:
    """Return the tools with what the grammar enforces: in a forced call, the parameters of each that may be
    called, regardless of `strict`, as with schemas of `response_format`."""
    if not box.forced:
        return box.tools
    enforced = []
    for i, tool in enumerate(box.tools):
        function = tool["function"]
        if box.function in ("", function["name"]):
            where = f"{box.param}[{i}]{'' if box.legacy else '.function'}.parameters"
            function = {**function, "parameters": _object(function["parameters"], where), "strict": True}
        enforced.append({**tool, "function": function})
    return enforced


def _object(parameters: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """Return the schema of an object; without parameters, of an empty one. Raise RequestError for a schema of
    anything else."""
    if not parameters:
        return _NO_PARAMETERS
    kind = parameters.get("type")
    if kind == "object" or (kind is None and not _OTHER_TYPES.isdisjoint(parameters)):
        return parameters
    if kind is not None and not (isinstance(kind, list) and "object" in kind):
        raise bad(f'{where}.type must be "object": arguments of a call are a JSON object.', f"{where}.type")
    return {**parameters, "type": "object"}


def _legacy(body: ChatBody) -> Toolbox:
    if body.tools or body.tool_choice is not None:
        raise bad("Send tools and tool_choice, or functions and function_call, not both.", "functions")
    asked = body.function_call
    if isinstance(asked, NamedFunction):
        choice, name = "function", asked.name
    else:
        choice, name = asked or "auto", ""
    return Toolbox(
        _shown(body.functions or (), "functions", ""),
        choice if body.functions or name else "none",
        name,
        legacy=True,
        param="functions",
    )


def _choice(choice: str | NamedTool | None, tools: bool) -> tuple[str, str]:
    if isinstance(choice, NamedTool):
        return "function", choice.function.name
    if not tools:
        return (choice or "none") if choice == "required" else "none", ""
    return choice or "auto", ""


def _choice_param(box: Toolbox) -> str:
    return "function_call" if box.legacy else "tool_choice"


def _shown(functions: Sequence[Function], param: str, part: str) -> tuple[TemplateTool, ...]:
    shown: list[TemplateTool] = []
    names: set[str] = set()
    for i, function in enumerate(functions):
        where = f"{param}[{i}]{part}"
        if function.name in names:
            raise bad(f"{where}.name {function.name!r} is a duplicate.", f"{where}.name")
        names.add(function.name)
        check_depth(function.parameters, f"{where}.parameters")
        described: dict[str, Any] = {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        }
        if function.strict is not None:
            described["strict"] = function.strict
        tool = {"type": "function", "function": described}
        check_size(msgspec.json.encode(tool), MAX_TOOL_BYTES, where)
        check_references(function.parameters, f"{where}.parameters")
        shown.append(tool)
    return tuple(shown)
