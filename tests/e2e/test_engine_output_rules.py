"""Real vLLM with structured output, with tools, and with the other options of a request.

kvasir-tiny follows no instruction, but it cannot leave a grammar: whatever it says here is forced to be
valid. Two engines, so that a constrained stream can go on elsewhere and be handed from prefill to decode.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.recorder import Choice, FullRecorder, Recorded
from tests.kit.models.tiny_tokens import WHITE
from tests.kit.shared.engines import EngineRegistry, engines_of
from tests.kit.shared.specs import PLAIN

from kvasir.config.load.model_files import resolve_model
from kvasir.core.requests import (
    Constraint,
    Continuation,
    Delta,
    EngineRequest,
    FinishReason,
    Leg,
    OutputParsing,
    Sampling,
    StructuredOutput,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MODEL = resolve_model("kvasir-tiny")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["gay", "grim"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Ålesund"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIDES = {
    "type": "function",
    "function": {"name": "tides", "parameters": {"type": "object", "properties": {"at": {"enum": ["sea"]}}}},
}
TOOLS = json.dumps([WEATHER, TIDES])
THINK_NOT = '{"enable_thinking": false}'
NO_WHITE = tuple((token, -100.0) for token in WHITE)
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<who>",
            "content": {"type": "json_schema", "json_schema": PERSON},
            "end": "</who>",
        },
    }
)


class Prompts(FreshPrompts):
    """That end with a whole character: after a half one, the text of the prompt is told again."""

    def fresh(self, length: int) -> list[int]:
        return [*super().fresh(length - 1), 70]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(engines: EngineRegistry) -> Sequence[EngineBench]:
    """An engine that prefills, and one that decodes and knows hermes' tools and qwen3's reasoning."""
    return await engines.running(*engines_of(PLAIN))


@pytest.fixture
def engine(pair: Sequence[EngineBench]) -> EngineBench:
    return pair[1]


@pytest.fixture(scope="module")
def prompts() -> FreshPrompts:
    return Prompts(random.Random(29))


def greedy(**changes: Any) -> Sampling:
    return replace(Sampling(temperature=0.0, max_tokens=200, logit_bias=NO_WHITE), **changes)


def ruled(constraint: Constraint, spec: Any = "", **changes: Any) -> Sampling:
    text = spec if isinstance(spec, str) else json.dumps(spec)
    return greedy(structured=StructuredOutput(constraint, text), **changes)


def spoken(
    bench: EngineBench, prompt: list[int], sampling: Sampling, parsing: OutputParsing
) -> EngineRequest:
    return replace(bench.request(prompt, sampling), parsing=parsing)


def last(done: Recorded) -> Delta:
    assert done.last is not None
    return done.last


def ok(done: Recorded) -> Choice:
    assert last(done).error is None, last(done).error_message
    assert done.choice().finish is FinishReason.STOP
    return done.choice()


def is_person(said: Any) -> bool:
    return (
        set(said) == {"name", "age", "mood"}
        and len(said["name"]) <= 12
        and 0 <= said["age"] <= 150
        and said["mood"] in ("gay", "grim")
    )


async def test_a_json_schema_is_followed(engine: EngineBench, prompts: FreshPrompts) -> None:
    done = await engine.generate(prompts.fresh(20), ruled(Constraint.JSON_SCHEMA, PERSON))
    assert is_person(json.loads(ok(done).text))


async def test_any_json_object_is_one(engine: EngineBench, prompts: FreshPrompts) -> None:
    # Whatever it would say, it has to close what it opened: no letter is left to it.
    sampling = ruled(Constraint.JSON_OBJECT, allowed_token_ids=closing_tokens(), max_tokens=400)
    done = await engine.generate(prompts.fresh(20), sampling)
    assert isinstance(json.loads(ok(done).text), dict)


def closing_tokens() -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    return (*(tokenizer.convert_tokens_to_ids(each) for each in "{}"), tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("constraint", "rule", "pattern"),
    [
        (Constraint.REGEX, r"(yes|no), [0-9]{2}!", r"(yes|no), [0-9]{2}!"),
        (Constraint.CHOICE, ["rain", "sun", 'a "quoted" 😀'], 'rain|sun|a "quoted" 😀'),
        (Constraint.GRAMMAR, 'root ::= "a" b\nb ::= "b" | "c" b', "ac{0,200}b"),
        (Constraint.GRAMMAR, 'start: "x" ("y" | "z")', "x[yz]"),
        (Constraint.STRUCTURAL_TAG, TAG, r"<who>\{.*\}</who>"),
    ],
    ids=["regex", "choice", "ebnf", "lark", "structural-tag"],
)
async def test_every_kind_of_rule_is_followed(
    engine: EngineBench, prompts: FreshPrompts, constraint: Constraint, rule: Any, pattern: str
) -> None:
    # A draw would find what greed does not.
    sampling = ruled(constraint, rule, temperature=1.0, seed=5)
    for _ in range(3):
        done = await engine.generate(prompts.fresh(20), sampling)
        assert re.fullmatch(pattern, ok(done).text, re.DOTALL), ok(done).text


async def test_a_schema_gets_the_compiler_that_knows_all_of_it(
    engine: EngineBench, prompts: FreshPrompts
) -> None:
    # The first compiler of an engine's life is another one, which would leave `multipleOf` out.
    await engine.generate(prompts.fresh(20), ruled(Constraint.JSON_SCHEMA, PERSON))
    schema = {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 999}
    for seed in range(8):
        sampling = ruled(Constraint.JSON_SCHEMA, schema, temperature=1.5, seed=seed)
        said = int(ok(await engine.generate(prompts.fresh(20), sampling)).text)
        assert said % 7 == 0


@pytest.mark.parametrize(
    ("constraint", "rule", "words"),
    [
        (Constraint.JSON_SCHEMA, "{not json", "Invalid JSON"),
        (Constraint.JSON_SCHEMA, {"type": "nonsense"}, "nonsense"),
        (Constraint.REGEX, "(unclosed", "[Pp]aren"),
        (Constraint.GRAMMAR, "root ::= undefined_rule", "undefined_rule"),
        (Constraint.CHOICE, [], "at least one"),
        (Constraint.CHOICE, {"a": 1}, "array of strings"),
        (Constraint.STRUCTURAL_TAG, {"type": "structural_tag"}, "structural tag"),
        (Constraint.REGEX, "a" * 70_000, "at most 65536"),
    ],
)
async def test_a_bad_rule_is_refused_in_the_compilers_words(
    engine: EngineBench, prompts: FreshPrompts, constraint: Constraint, rule: Any, words: str
) -> None:
    done = await engine.generate(prompts.fresh(20), ruled(constraint, rule))
    assert last(done).error == "invalid_value"
    assert re.search(words, last(done).error_message or ""), last(done).error_message
    assert len(last(done).error_message or "") <= 1000


async def test_others_go_on_while_a_large_schema_is_compiled(
    engine: EngineBench, prompts: FreshPrompts
) -> None:
    words = {"type": "string", "pattern": "^[a-z]{1,10}$"}
    large = {"type": "object", "properties": {f"field_{n}": words for n in range(1000)}}
    slow = engine.request(prompts.fresh(20), ruled(Constraint.JSON_SCHEMA, large, max_tokens=4))
    quick = engine.request(prompts.fresh(20), greedy(max_tokens=60, ignore_eos=True))
    engine.engine.submit([slow, quick])
    assert last(await engine.ended(slow.request_id)).error is None
    assert last(await engine.ended(quick.request_id)).error is None
    assert isinstance(engine.recorder, FullRecorder)
    assert list(engine.recorder.deltas).index(quick.request_id) < list(engine.recorder.deltas).index(
        slow.request_id
    )


def called(done: Recorded) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, name, arguments in ok(done).calls.values()]


def fits(call: tuple[str, Any]) -> bool:
    name, arguments = call
    if name == "tides":
        return set(arguments) <= {"at"}
    return (
        name == "weather"
        and set(arguments) == {"city", "days"}
        and arguments["city"] in ("Oslo", "Ålesund")
        and arguments["days"] in (1, 2, 3)
    )


@pytest.mark.parametrize("alone", [False, True])
async def test_a_required_call_is_made_and_fits_its_schema(
    engine: EngineBench, prompts: FreshPrompts, alone: bool
) -> None:
    parsing = OutputParsing(
        tools=json.dumps([WEATHER]),
        tool_choice="required",
        parallel_tool_calls=not alone,
        template_kwargs=THINK_NOT,
    )
    (done,) = await engine.run(spoken(engine, prompts.fresh(20), greedy(max_tokens=300), parsing))
    if alone:
        ok(done)
    calls = [
        (name, json.loads(arguments))
        for _, name, arguments in list(done.choice().calls.values())[: 1 if not alone else None]
    ]
    assert len(calls) == 1
    assert all(fits(call) for call in calls)
    assert done.choice().text.strip() == ""


async def test_a_named_call_is_made(engine: EngineBench, prompts: FreshPrompts) -> None:
    parsing = OutputParsing(
        tools=TOOLS, tool_choice="function", function="weather", template_kwargs=THINK_NOT
    )
    (done,) = await engine.run(spoken(engine, prompts.fresh(20), greedy(), parsing))
    (call,) = called(done)
    assert call[0] == "weather"
    assert fits(call)


async def test_a_call_is_forced_without_a_parser_of_the_models_own(
    pair: Sequence[EngineBench], prompts: FreshPrompts
) -> None:
    engine = pair[0]
    parsing = OutputParsing(tools=TOOLS, tool_choice="function", function="weather")
    (done,) = await engine.run(spoken(engine, prompts.fresh(20), greedy(), parsing))
    (call,) = called(done)
    assert fits(call)
    (refused,) = await engine.run(
        spoken(engine, prompts.fresh(20), greedy(), replace(parsing, tool_choice="auto", function=""))
    )
    assert last(refused).error == "invalid_value"
    assert "engine.tool_parser" in (last(refused).error_message or "")


async def test_a_rule_waits_for_the_reasoning_to_end(engine: EngineBench, prompts: FreshPrompts) -> None:
    sampling = ruled(Constraint.REGEX, "sun|rain")
    at_once = OutputParsing(template_kwargs=THINK_NOT)
    (done,) = await engine.run(spoken(engine, prompts.fresh(20), sampling, at_once))
    assert ok(done).text in ("sun", "rain")
    thinking = spoken(
        engine, prompts.fresh(20), replace(sampling, max_tokens=20, ignore_eos=True), OutputParsing()
    )
    (done,) = await engine.run(thinking)
    assert done.choice().reasoning != ""
    assert done.choice().text == ""
    assert 18 <= done.choice().reasoning_tokens <= 20
    hidden = spoken(engine, prompts.fresh(20), sampling, OutputParsing(reasoning=False))
    (done,) = await engine.run(hidden)
    assert done.choice().reasoning == ""


async def test_a_parsed_choice_has_its_own_parser(engine: EngineBench, prompts: FreshPrompts) -> None:
    parsing = OutputParsing(
        tools=TOOLS, tool_choice="required", template_kwargs=THINK_NOT, parallel_tool_calls=False
    )
    sampling = greedy(n=3, temperature=1.0, seed=3)
    (done,) = await engine.run(spoken(engine, prompts.fresh(20), sampling, parsing))
    assert last(done).error is None
    assert sorted(done.choices) == [0, 1, 2]
    for choice in done.choices.values():
        (call,) = choice.calls.values()
        assert fits((call[1], json.loads(call[2])))


async def goes_on_anywhere(
    engine: EngineBench, prompt: list[int], sampling: Sampling, parsing: OutputParsing | None
) -> Choice:
    """Cut after every token, continued, and held against the stream that was not cut, which is returned."""
    request = replace(engine.request(prompt, sampling), parsing=parsing)
    (done,) = await engine.run(request)
    whole = ok(done)
    assert isinstance(engine.recorder, FullRecorder)
    deltas = engine.recorder.deltas[request.request_id]
    requests = []
    for cut in range(1, len(deltas)):
        had = deltas[:cut]
        count = sum(len(each.token_ids) for each in had)
        length = sum(len(each.text) if each.raw_length is None else each.raw_length for each in had)
        rest = engine.request([*prompt, *whole.tokens[:count]], sampling)
        requests.append(replace(rest, parsing=parsing, continuation=Continuation(count, length)))
        engine.recorder.request(rest.request_id).choice().tokens = whole.tokens[:count]
        choice = engine.recorder.request(rest.request_id).choice()
        for each in had:
            choice.text += each.text
            choice.reasoning += each.reasoning
            for piece in each.tool_calls:
                call = choice.calls.setdefault(piece.index, ["", "", ""])
                for at, value in enumerate((piece.call_id, piece.name, piece.arguments)):
                    call[at] += value
    for cut, continued in enumerate(await engine.run(*requests), 1):
        assert last(continued).error is None, last(continued).error_message
        choice = continued.choice()
        assert (choice.tokens, choice.text, choice.reasoning) == (
            whole.tokens,
            whole.text,
            whole.reasoning,
        ), cut
        assert [call[1:] for call in choice.calls.values()] == [call[1:] for call in whole.calls.values()], (
            cut
        )
        assert choice.finish is whole.finish
    return whole


@pytest.mark.parametrize(
    "rule",
    [
        (Constraint.JSON_SCHEMA, PERSON),
        (Constraint.REGEX, r"(yes|no), [0-9]{9}!"),
        (Constraint.CHOICE, ["rain and snow and rain", "rain and snow and sun"]),
        (
            Constraint.JSON_SCHEMA,
            {
                "type": "array",
                "items": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 99},
                "minItems": 4,
                "maxItems": 5,
            },
        ),
    ],
    ids=["schema", "regex", "choice", "other-compiler"],
)
async def test_a_constrained_stream_goes_on_exactly(
    engine: EngineBench, prompts: FreshPrompts, rule: tuple[Constraint, Any]
) -> None:
    whole = await goes_on_anywhere(engine, prompts.fresh(20), ruled(*rule), None)
    assert len(whole.tokens) > 3


async def test_a_stream_of_calls_goes_on_exactly(engine: EngineBench, prompts: FreshPrompts) -> None:
    parsing = OutputParsing(
        tools=TOOLS, tool_choice="required", parallel_tool_calls=False, template_kwargs=THINK_NOT
    )
    whole = await goes_on_anywhere(engine, prompts.fresh(20), greedy(), parsing)
    assert len(whole.calls) == 1


async def test_output_that_breaks_its_rule_cannot_go_on(engine: EngineBench, prompts: FreshPrompts) -> None:
    request = engine.request(prompts.fresh(30), ruled(Constraint.REGEX, "[0-9]{9}"))
    engine.recorder.request(request.request_id).choice().tokens = [200, 201]
    (done,) = await engine.run(replace(request, continuation=Continuation(2, 0)))
    assert done.choice().finish is FinishReason.ERROR


async def test_a_rule_and_a_call_survive_the_hand_off(
    pair: Sequence[EngineBench], prompts: FreshPrompts
) -> None:
    prefill, decode = pair
    prompt = prompts.fresh(80)
    sampling = ruled(Constraint.JSON_SCHEMA, PERSON, logprobs=2)
    offered = await prefill.generate(prompt, sampling, leg=Leg.PREFILL)
    assert last(offered).handoff is not None, last(offered).error_message
    done = await decode.generate(prompt, sampling, leg=Leg.DECODE, handoff=last(offered).handoff)
    assert is_person(json.loads(ok(done).text))
    assert last(done).usage is not None
    together = await decode.generate(prompt, sampling, salt="together")
    assert ok(together).tokens == ok(done).tokens


async def test_the_prompts_logprobs_come_with_the_first_delta(
    engine: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(150)  # more than one chunk
    for n in (1, 2):
        done = await engine.generate(prompt, greedy(prompt_logprobs=2, max_tokens=3, n=n, temperature=1.0))
        positions = done.prompt_logprobs
        assert len(positions) == len(prompt)
        assert positions[0] is None
        for token, position in zip(prompt[1:], positions[1:], strict=True):
            assert position is not None
            assert position.sampled.token_id == token
            assert len(position.top) == 2
            assert position.top[0].logprob >= position.top[1].logprob >= -40


async def test_words_and_tokens_are_forbidden_and_allowed(engine: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(30)
    free = await engine.generate(prompt, greedy(max_tokens=12, ignore_eos=True))
    word = next(text for token in free.choice().tokens if (text := decode(token).strip()).isalpha())
    done = await engine.generate(prompt, greedy(max_tokens=12, ignore_eos=True, bad_words=(word,)))
    assert done.choice().text != free.choice().text
    assert word not in done.choice().text
    few = (300, 301, 302)
    done = await engine.generate(prompt, greedy(max_tokens=12, allowed_token_ids=few))
    assert set(done.choice().tokens) <= set(few)
    bad = await engine.generate(prompt, greedy(allowed_token_ids=(99_999,)))
    assert last(bad).error == "invalid_request"


async def test_reasoning_is_bounded_where_there_is_a_parser(
    pair: Sequence[EngineBench], prompts: FreshPrompts
) -> None:
    prefill, decode = pair
    refused = await prefill.generate(prompts.fresh(20), greedy(thinking_tokens=4))
    assert last(refused).error == "invalid_request"
    thought = encode("<think>")
    prompt = [*prompts.fresh(20), *thought]
    request = spoken(
        decode, prompt, greedy(thinking_tokens=6, max_tokens=30, ignore_eos=True), OutputParsing()
    )
    (done,) = await decode.run(request)
    assert last(done).error is None, last(done).error_message
    assert "</think>" not in done.choice().reasoning
    assert done.choice().text != ""


def decode(token: int) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(str(MODEL)).decode([token]))


def encode(text: str) -> list[int]:
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(str(MODEL)).encode(text, add_special_tokens=False)
    return tokens


async def test_a_leg_is_stopped_while_it_is_prepared(engine: EngineBench, prompts: FreshPrompts) -> None:
    words = {"type": "string", "pattern": "^[a-z]{1,9}$"}
    large = {"type": "object", "properties": {f"other_{n}": words for n in range(900)}}
    request = engine.request(prompts.fresh(20), ruled(Constraint.JSON_SCHEMA, large))
    engine.engine.submit([request])
    engine.engine.abort([request.request_id])
    done = await engine.ended(request.request_id)
    assert done.choice().finish is FinishReason.ABORT
    again = await engine.generate(prompts.fresh(20), ruled(Constraint.REGEX, "after"))
    assert ok(again).text == "after"
