"""Structured output of real vLLM: JSON that fits its schema, calls that fit their tools, separate reasoning;
for tenants with keys, each charged for its own usage. Beside it a model that embeds, which is simulated
(`test_models_and_embeddings.py` has a real one).

kvasir-tiny follows no instruction, but it cannot leave a grammar. It writes no calls and no end of reasoning
by itself, so that they are forced on it in the very letters that the parsers know, and two of its tokens get
the names of the marks between which models reason.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from tests.kit.footprint import Footprint
from tests.kit.gateway.chats import AT_ONCE, MODEL, USER, called, chat
from tests.kit.shared.deployments import KEYS

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow

END = (1, 6)


class Person(BaseModel):
    """What the model is to tell of somebody."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["gay", "grim"]


class Weather(BaseModel):
    """Asks for the weather."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Ålesund"]
    days: Literal[1, 2, 3]


SCHEMA = Person.model_json_schema()
TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")
TIDES: Any = {
    "type": "function",
    "function": {"name": "tides", "parameters": {"type": "object", "properties": {"at": {"enum": ["sea"]}}}},
}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
    '<tool_call>\n{"name": "tides", "arguments": {"at": "sea"}}\n</tool_call>'
)
THINKING: Any = [*USER, {"role": "assistant", "content": "<think>"}]
THOUGHTFUL = {"continue_final_message": True, "add_generation_prompt": False, "thinking_token_budget": 6}


@pytest.fixture(scope="module")
def stack(speaking: Stack) -> Stack:
    return speaking


Connect = Callable[[str], openai.OpenAI]


@pytest.fixture
def connect(stack: Stack) -> Iterator[Connect]:
    """Clients, each with the key of a tenant."""
    made: list[openai.OpenAI] = []

    def connected(key: str) -> openai.OpenAI:
        made.append(openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0, timeout=60))
        return made[-1]

    yield connected
    for each in made:
        each.close()


@pytest.fixture
def client(connect: Connect) -> openai.OpenAI:
    return connect(KEYS["app"])


def fits(call: tuple[str, str]) -> bool:
    """Whether it is a call of the tool for the weather, and good."""
    jsonschema.validate(json.loads(call[1]), Weather.model_json_schema())
    return call[0] == "weather"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
    ],
    ids=["response_format", "structured_outputs", "guided_json"],
)
def test_what_is_said_fits_the_schema(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    choice = chat(client, extra={**AT_ONCE, **fields})
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    # Whatever it would say, it has to close what it opened: no letter is left to it.
    braces = [token for brace in "{}" for token in tokens_of(client, brace)]
    free = chat(client, extra={**AT_ONCE, "allowed_token_ids": braces}, max_tokens=8)
    ruled = {**AT_ONCE, "allowed_token_ids": [*braces, *END]}
    choice = chat(client, extra=ruled, response_format={"type": "json_object"})
    assert json.loads(choice.message.content) == {}
    assert choice.finish_reason == "stop" != free.finish_reason


def tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    """The ids of a text."""
    asked = {"prompt": text, "add_special_tokens": False}
    url = str(client.base_url).removesuffix("/v1/")
    headers = {"authorization": f"Bearer {client.api_key}"}
    found: list[int] = httpx.post(f"{url}/tokenize", json=asked, headers=headers).json()["tokens"]
    return found


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ({"structured_outputs": {"regex": r"(yes|no), [0-9]{2}!"}}, r"(yes|no), [0-9]{2}!"),
        ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"structured_outputs": {"choice": ["rain", 'a "quoted" 😀']}}, 'rain|a "quoted" 😀'),
        ({"guided_choice": ["sun", "snow"]}, "sun|snow"),
        ({"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= "b" | "c" b'}}, "ac*b"),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, "x[yz]"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<who>",
                        "content": {"type": "json_schema", "json_schema": SCHEMA},
                        "end": "</who>",
                    },
                }
            },
            r"<who>\{.*\}</who>",
        ),
    ],
    ids=["regex", "guided_regex", "choice", "guided_choice", "ebnf", "lark", "structural_tag"],
)
def test_what_is_said_follows_the_rule(client: openai.OpenAI, rule: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        choice = chat(client, extra={**AT_ONCE, **rule}, temperature=1.0, seed=seed)
        assert re.fullmatch(pattern, choice.message.content, re.DOTALL), choice.message.content
    if "response_format" not in rule:
        text = client.completions.create(model=MODEL, prompt="It is", extra_body=rule).choices[0].text
        assert re.fullmatch(pattern, text), text


def test_the_parsing_helpers_make_objects_of_what_is_said(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "temperature": 0, "extra_body": AT_ONCE}
    answer = client.chat.completions.parse(**fields, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)
    with client.chat.completions.stream(**fields, response_format=Person) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    forced = client.chat.completions.parse(
        **fields, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    calls = forced.choices[0].message.tool_calls or []
    assert [type(call.function.parsed_arguments) for call in calls] == [Weather]


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice = chat(
        client, tools=[TIDES, TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    (call,) = called(choice)
    assert fits(call)
    assert choice.message.content is None
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].id


def test_a_required_call_is_made_of_whichever_tool(client: openai.OpenAI) -> None:
    for seed in range(3):
        choice = chat(
            client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=1.0,
            seed=seed,
        )  # fmt: skip
        (call,) = called(choice)
        assert fits(call)
        assert choice.finish_reason == "tool_calls"


def test_calls_that_the_model_chooses_to_make_are_told_from_its_text(client: openai.OpenAI) -> None:
    forced = {**AT_ONCE, "structured_outputs": {"regex": re.escape(f"Well. {CALLS}")}}
    # With a strict tool, vLLM's grammar would allow calls beside what the client's rule allows.
    loose = {**TOOL, "function": {**TOOL["function"], "strict": False}}
    choice = chat(client, extra=forced, tools=[TIDES, loose], tool_choice="auto", max_tokens=400)
    assert [(name, json.loads(arguments)) for name, arguments in called(choice)] == [
        ("weather", {"city": "Oslo", "days": 2}),
        ("tides", {"at": "sea"}),
    ]
    assert choice.message.content.strip() == "Well."
    assert choice.finish_reason == "tool_calls"
    alone = chat(client, extra=forced, tools=[TIDES, loose], parallel_tool_calls=False, max_tokens=400)
    assert [name for name, _ in called(alone)] == ["weather"]


def test_tools_that_may_not_be_called_are_not(client: openai.OpenAI) -> None:
    for choice in (
        chat(client, tools=[TOOL], tool_choice="none"),
        chat(client, tools=[TOOL], tool_choice="auto"),
    ):
        assert called(choice) == []
        assert choice.message.content
        assert choice.finish_reason == "stop"


def test_what_was_called_and_found_goes_into_the_next_turn(client: openai.OpenAI) -> None:
    forced = chat(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    found = {"role": "tool", "tool_call_id": forced.message.tool_calls[0].id, "content": "Sunny."}
    turns = [*USER, forced.message.model_dump(exclude_none=True), found]
    assert chat(client, messages=turns, tools=[TOOL], tool_choice="none").message.content


def test_older_functions_are_called_in_their_own_form(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, functions=[TOOL["function"]],
        function_call={"name": "weather"}, extra_body=AT_ONCE,
    )  # fmt: skip
    call = answer.choices[0].message.function_call
    assert call is not None
    assert fits((call.name, call.arguments))


def test_reasoning_is_apart_from_what_is_said(client: openai.OpenAI) -> None:
    choice = chat(client, extra=THOUGHTFUL, messages=THINKING, max_tokens=40)
    assert choice.message.reasoning_content == choice.message.reasoning != ""
    assert choice.message.content
    assert "think>" not in choice.message.content + choice.message.reasoning
    hidden = chat(client, extra={**THOUGHTFUL, "include_reasoning": False}, messages=THINKING, max_tokens=40)
    assert hidden.message.content == choice.message.content
    assert not hasattr(hidden.message, "reasoning_content")
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    assert answer.choices[0].message.content is None


def test_a_schema_waits_for_the_reasoning_to_end(client: openai.OpenAI) -> None:
    choice = chat(client, extra={**THOUGHTFUL, "guided_json": SCHEMA}, messages=THINKING)
    assert choice.message.reasoning
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_vectors_are_the_same_in_every_form(client: openai.OpenAI) -> None:
    texts = ["And it came to pass", "The king of Israel", "Count to five"]
    batch = client.embeddings.create(model="vectors", input=texts, encoding_format="float")
    assert [each.index for each in batch.data] == [0, 1, 2]
    encoded = client.embeddings.create(model="vectors", input=texts, encoding_format="base64")
    for one, other in zip(batch.data, encoded.data, strict=True):
        vector = array("f", base64.b64decode(str(other.embedding)))
        assert list(vector) == pytest.approx(one.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-4)
    alone = client.embeddings.create(model="vectors", input=texts[0])
    assert alone.data[0].embedding == pytest.approx(batch.data[0].embedding, abs=1e-4)
    short = client.embeddings.create(model="vectors", input=texts[0], dimensions=32).data[0].embedding
    assert len(short) == 32
    norm = math.hypot(*alone.data[0].embedding[:32])
    assert short == pytest.approx([each / norm for each in alone.data[0].embedding[:32]], abs=1e-4)
    assert batch.usage.prompt_tokens == batch.usage.total_tokens > alone.usage.prompt_tokens > 0


def test_each_model_does_what_it_is_for(client: openai.OpenAI, connect: Connect) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "vectors"]
    assert [model.id for model in connect(KEYS["bound"]).models.list()] == [MODEL]
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unsupported_task"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="vectors", prompt="x")
    assert caught.value.code == "unsupported_task"


def test_a_model_that_is_not_there_or_not_for_the_tenant_is_not_found(
    client: openai.OpenAI, connect: Connect
) -> None:
    told = []
    for each, model in ((client, "nobody"), (connect(KEYS["bound"]), "vectors")):
        with pytest.raises(openai.NotFoundError) as caught:
            each.embeddings.create(model=model, input="x")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        told.append(caught.value.message.replace(model, "MODEL"))
    assert told[0] == told[1]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_an_unknown_key_opens_nothing_and_only_operators_see_all(
    stack: Stack, client: openai.OpenAI, connect: Connect
) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        connect("sk-unknown").chat.completions.create(model=MODEL, messages=USER)
    assert caught.value.code == "invalid_api_key"
    assert "sk-unknown" not in str(caught.value)
    with pytest.raises(openai.PermissionDeniedError):
        client.get("../status", cast_to=object)
    assert httpx.get(f"{stack.url}/metrics").status_code == 401


def test_who_asks_too_often_is_told_when_to_come_again(connect: Connect) -> None:
    slow = connect(KEYS["slow"])
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 1}
    left = [
        slow.chat.completions.with_raw_response.create(**fields).headers["x-ratelimit-remaining-requests"]
        for _ in range(2)
    ]
    assert left == ["1", "0"]
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            slow.chat.completions.create(**fields, stream=stream)
        assert caught.value.code == "rate_limit_requests"
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 60


def test_an_output_is_bounded_by_the_tenants_own_limit(connect: Connect) -> None:
    bound = connect(KEYS["bound"])
    fields: Any = {"model": MODEL, "messages": USER, "extra_body": {"ignore_eos": True}}
    answer = bound.chat.completions.create(**fields)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (8, "length")
    with pytest.raises(openai.BadRequestError):
        bound.chat.completions.create(**fields, max_tokens=9)


def test_a_tenant_pays_for_what_it_used_also_when_it_leaves(stack: Stack, client: openai.OpenAI) -> None:
    def paid() -> list[float]:
        name = "kvasir_tenant_tokens_total"
        return [stack.metric(name, tenant="app", kind=kind) for kind in ("prompt", "output")]

    before = paid()
    whole = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=20).usage
    assert whole is not None
    after = paid()
    assert (after[0] - before[0], after[1] - before[1]) == (whole.prompt_tokens, whole.completion_tokens)
    stream = client.completions.create(
        model=MODEL, prompt="And it came to pass", max_tokens=1500, stream=True,
        extra_body={
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )  # fmt: skip
    seen = [chunk.usage for chunk in itertools.islice(stream, 10)][-1]
    stream.close()
    stack.wait_until(stack.idle, 10.0, "the engine to have stopped")
    left = paid()
    assert seen is not None
    assert left[0] - after[0] == seen.prompt_tokens
    assert seen.completion_tokens <= left[1] - after[1] < 1500


@pytest.mark.stops_stack
def test_down_from_another_terminal_leaves_nothing(stack: Stack) -> None:
    footprint = Footprint.of(stack)
    down = stack.kvasir("down")
    assert down.returncode == 0, down.stderr
    footprint.assert_gone()
    assert stack.kvasir("status").returncode == 1
