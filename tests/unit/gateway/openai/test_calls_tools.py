"""Tools, earlier tool calls, and reasoning, as templates and parsers receive them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir.core.errors import RequestError
from kvasir.core.requests import OutputParsing
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.openai.calls import Call, chat_call
from kvasir_platform.gateway.openai.schema.decode import decode_chat
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
ALL = ModelCapabilities(tools=True, reasoning=True)
TEMPLATE = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}", {})
SEARCH = {"name": "search", "description": "Search.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SEARCH}
NAMED = {"type": "function", "function": {"name": "search"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}


def call(capabilities: ModelCapabilities = ALL, **body: Any) -> Call:
    whole = {"model": "m", "messages": USER, **body}
    return chat_call(decode_chat(json.dumps(whole).encode()), TEMPLATE, 100, capabilities)


def shown(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """`messages` as the template got them."""
    (prompt,) = call(messages=list(messages)).prompts
    assert isinstance(prompt, str)
    told: list[dict[str, Any]] = json.loads(prompt.removesuffix("null"))
    return told


def parsing(capabilities: ModelCapabilities = ALL, **body: Any) -> OutputParsing:
    made = call(capabilities, **body).parsing
    assert made is not None
    return made


def test_a_plain_stream_costs_no_parsing() -> None:
    assert call(ModelCapabilities()).parsing is None
    assert call(ModelCapabilities(tools=True)).parsing is None
    assert call(ModelCapabilities(), tools=[TOOL], tool_choice="none").parsing is None


def test_a_model_that_reasons_is_always_parsed() -> None:
    assert parsing() == OutputParsing()
    assert parsing(include_reasoning=False) == OutputParsing(reasoning=False)
    kwargs = parsing(reasoning_effort="low", chat_template_kwargs={"a": 1}).template_kwargs
    assert json.loads(kwargs) == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("body", "choice", "function"),
    [
        ({}, "auto", ""),
        ({"tool_choice": None}, "auto", ""),
        ({"tool_choice": "auto"}, "auto", ""),
        ({"tool_choice": "required"}, "required", ""),
        ({"tool_choice": NAMED}, "function", "search"),
    ],
)
def test_parsers_get_the_tools_and_the_choice(body: dict[str, Any], choice: str, function: str) -> None:
    made = parsing(tools=[TOOL], **body)
    assert (made.tool_choice, made.function, made.parallel_tool_calls) == (choice, function, True)
    forced = {} if choice == "auto" else {"strict": True}
    assert json.loads(made.tools) == [{**TOOL, "function": {**SEARCH, **forced}}]


def test_calls_may_be_wanted_one_at_a_time() -> None:
    assert not parsing(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls


def test_tools_that_may_not_be_called_are_shown_all_the_same() -> None:
    made = call(tools=[TOOL], tool_choice="none")
    assert made.parsing == OutputParsing()
    assert '"search"' in str(made.prompts[0])


def test_templates_get_tools_as_vllm_gives_them() -> None:
    bare = {"type": "function", "function": {"name": "f", "strict": True}}
    (prompt,) = call(tools=[bare, TOOL]).prompts
    assert isinstance(prompt, str)
    told = json.loads(prompt[prompt.index("]") + 1 :])
    first = {"name": "f", "description": None, "parameters": None, "strict": True}
    assert told == [{"type": "function", "function": first}, TOOL]
    assert list(told[0]["function"]) == list(first)


def test_tools_are_refused_where_no_parser_would_find_the_calls() -> None:
    for body in ({"tools": [TOOL]}, {"functions": [SEARCH]}):
        with pytest.raises(RequestError, match=r"engine\.tool_parser") as caught:
            call(ModelCapabilities(reasoning=True), **body)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", next(iter(body)))


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_calls_that_are_forced_need_no_parser_of_the_models(tool_choice: Any) -> None:
    made = parsing(ModelCapabilities(), tools=[TOOL], tool_choice=tool_choice)
    assert made == parsing(ALL, tools=[TOOL], tool_choice=tool_choice)


def forced(parameters: Any, *, strict: bool | None = None, **body: Any) -> dict[str, Any]:
    """What the grammar of a required call of one tool gets."""
    function = {"name": "search", "parameters": parameters, "strict": strict}
    made = parsing(
        **{"tools": [{"type": "function", "function": function}], "tool_choice": "required", **body}
    )
    (tool,) = json.loads(made.tools)
    enforced: dict[str, Any] = tool["function"]
    return enforced


@pytest.mark.parametrize("strict", [None, False, True])
def test_arguments_of_a_forced_call_follow_the_parameters(strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    enforced = forced(schema, strict=strict)
    assert (enforced["parameters"], enforced["strict"]) == (schema, True)
    chosen = forced(schema, strict=strict, tool_choice="auto")
    assert (chosen["parameters"], chosen.get("strict")) == (schema, strict)


@pytest.mark.parametrize(
    ("parameters", "enforced"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"properties": {"q": {}}}, {"type": "object", "properties": {"q": {}}}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}),
    ],
)
def test_arguments_of_a_forced_call_are_an_object(parameters: Any, enforced: Any) -> None:
    assert forced(parameters)["parameters"] == enforced


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"tools": [TOOL, {**TOOL, "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[1]",
        ),
        ({"functions": [{**SEARCH, "parameters": {"type": ["null"]}}]}, "functions[0]"),
    ],
)
def test_parameters_that_are_no_object_cannot_be_forced(body: dict[str, Any], param: str) -> None:
    choice = {"tool_choice": "required"} if "tools" in body else {"function_call": {"name": "search"}}
    with pytest.raises(RequestError, match=r'type must be "object"') as caught:
        parsing(**body, **choice)
    assert caught.value.code == "invalid_value"
    assert (caught.value.param or "").startswith(param)
    assert (caught.value.param or "").endswith("parameters.type")
    parsing(**body)
    if "tools" in body:
        assert parsing(**body, tool_choice=NAMED).function == "search", "the other tool cannot be called"


@pytest.mark.parametrize(
    ("function_call", "choice", "function"),
    [(None, "auto", ""), ("auto", "auto", ""), ({"name": "search"}, "function", "search")],
)
def test_functions_are_tools_by_their_old_name(function_call: Any, choice: str, function: str) -> None:
    made = call(functions=[SEARCH], function_call=function_call)
    assert made.legacy_functions
    same = parsing(tools=[TOOL], tool_choice=NAMED if function else "auto")
    assert made.parsing == OutputParsing(
        tools=same.tools, tool_choice=choice, function=function, parallel_tool_calls=False
    )
    assert made.prompts == call(tools=[TOOL]).prompts
    unwanted = call(functions=[SEARCH], function_call="none").parsing
    assert unwanted is not None
    assert unwanted.tool_choice == "none"


def test_calls_come_to_templates_with_their_arguments_as_objects() -> None:
    said, told = shown(
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}] * 2, "name": "s"},
    )
    function = {"name": "search", "arguments": {"q": "x"}}
    assert said == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert told == {"role": "tool", "content": "a\na", "tool_call_id": "c1", "name": "s"}


@pytest.mark.parametrize(
    ("arguments", "object_"),
    [
        (None, {}),
        ("", {}),
        ("{", {}),
        ("[1]", {}),
        ("7", {}),
        ("[" * 10_000, {}),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_that_a_model_wrote_wrongly_do_not_end_a_conversation(
    arguments: Any, object_: dict[str, Any]
) -> None:
    function = {"name": "search", "arguments": arguments}
    (said,) = shown({"role": "assistant", "tool_calls": [{"id": "c", "function": function}]})
    assert said["tool_calls"][0]["function"]["arguments"] == object_


def test_old_function_messages_are_those_of_tools() -> None:
    said, told = shown(
        {"role": "assistant", "content": None, "function_call": {"name": "search", "arguments": "{}"}},
        {"role": "function", "name": "search", "content": "found"},
    )
    assert said["tool_calls"][0]["function"] == {"name": "search", "arguments": {}}
    assert told == {"role": "tool", "content": "found", "name": "search"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_what_was_thought_goes_back_under_both_names(field: str) -> None:
    (said,) = shown({"role": "assistant", "content": "a", field: "hm"})
    assert said == {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"}


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    answered: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": "No.",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert shown(answered) == [{"role": "assistant", "content": "No."}]
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "Sorry."}]
    (said,) = shown({"role": "assistant", "content": parts})
    assert said["content"] == "No.\nSorry."


def test_arguments_of_earlier_calls_are_counted_before_they_are_decoded() -> None:
    function = {"name": "f", "arguments": '{"a":[' + "[]," * 12_000 + "[]]}"}
    earlier = [{"id": str(i), "type": "function", "function": function} for i in range(3)]
    call(messages=[{"role": "assistant", "tool_calls": earlier[:1]}])
    with pytest.raises(RequestError) as refused:
        call(messages=[{"role": "assistant", "tool_calls": earlier}])
    assert refused.value.code == "body_too_complex"


@pytest.mark.parametrize("key", ["$ref", "$dynamicRef", "$recursiveRef"])
def test_no_schema_may_refer_to_another_server(key: str) -> None:
    schema = {"properties": {"a": {key: "https://example.org/schema"}}}
    with pytest.raises(RequestError, match="external references"):
        call(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
    with pytest.raises(RequestError, match="external references"):
        call(tools=[{"type": "function", "function": {**SEARCH, "parameters": schema}}])
    call(tools=[{"type": "function", "function": {**SEARCH, "parameters": {key: "#/$defs/a"}}}])
