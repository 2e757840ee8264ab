"""Internals of vLLM that parsing.py depends on: its real parsers on scripted output, whole, in steps and
truncated.

No engine runs. The tokenizer is kvasir-tiny's, with the marks that some parsers want as tokens of their own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.config.checks.parsers import REASONING_PARSERS, TOOL_PARSERS
from kvasir.config.load.model_files import resolve_model
from kvasir.core.requests import OutputParsing, Sampling
from kvasir_workers.engines.parts import StepParts

pytestmark = pytest.mark.slow

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TOOLS = json.dumps([WEATHER])
AUTO = OutputParsing(tools=TOOLS, tool_choice="auto")
REQUIRED = OutputParsing(tools=TOOLS, tool_choice="required")
NAMED = OutputParsing(tools=TOOLS, tool_choice="function", function="weather")
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ålesund 😀", "days": 3}}\n</tool_call>'
LONDON = ("weather", {"city": "London"})
NORTH = ("weather", {"city": "Ålesund 😀", "days": 3})


@dataclass(frozen=True)
class Script:
    """What a model says, and what its client is to hear."""

    text: str
    parsing: OutputParsing
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    prompt: str = "In the beginning"


SCRIPTS = {
    "hermes": Script("Let me see.\n" + HERMES_CALL, AUTO, "hermes", content="Let me see.\n", calls=(NORTH,)),
    "hermes, no call": Script(
        "It rains < 3 days a <tool shed", AUTO, "hermes", content="It rains < 3 days a <tool shed"
    ),
    "hermes, required": Script(
        '[{"name": "weather", "parameters": {"city": "Ålesund 😀", "days": 3}}]',
        REQUIRED,
        "hermes",
        calls=(NORTH,),
    ),
    "hermes, none wanted": Script(
        HERMES_CALL, OutputParsing(tools=TOOLS, tool_choice="none"), "hermes", content=HERMES_CALL
    ),
    "qwen3 and hermes": Script(
        "<think>\nRain or sun?\n</think>\n\nHere:\n" + HERMES_CALL,
        AUTO,
        "hermes",
        "qwen3",
        content="\n\nHere:\n",
        reasoning="\nRain or sun?\n",
        calls=(NORTH,),
    ),
    "qwen3, not told": Script(
        "<think>\nRain or sun?\n</think>\n\nSun.",
        OutputParsing(reasoning=False),
        None,
        "qwen3",
        content="\n\nSun.",
    ),
    "qwen3_coder": Script(
        "<tool_call>\n<function=weather>\n<parameter=city>\nLondon\n</parameter>\n</function>\n</tool_call>",
        AUTO,
        "qwen3_coder",
        calls=(LONDON,),
    ),
    "deepseek_r1": Script(
        "Rain or sun?</think>Sun 日本.",
        OutputParsing(),
        None,
        "deepseek_r1",
        content="Sun 日本.",
        reasoning="Rain or sun?",
        prompt="In the beginning<think>",
    ),
    "deepseek_r1, cut short": Script(
        "Rain or sun, who", OutputParsing(), None, "deepseek_r1", reasoning="Rain or sun, who"
    ),
    "llama3_json": Script(
        '{"name": "weather", "parameters": {"city": "London"}}', AUTO, "llama3_json", calls=(LONDON,)
    ),
    "pythonic": Script('[weather(city="London")]', AUTO, "pythonic", calls=(LONDON,)),
    "no parser, required": Script(
        '[{"name": "weather", "parameters": {"city": "London"}}, '
        '{"name": "weather", "parameters": {"city": "Ålesund 😀", "days": 3}}]',
        REQUIRED,
        calls=(LONDON, NORTH),
    ),
    "no parser, named": Script('{"city": "London"}', NAMED, calls=(LONDON,)),
    "no parser": Script("Sun, and <b>rain</b>.", OutputParsing(), content="Sun, and <b>rain</b>."),
}


@pytest.fixture(scope="module")
def tokenizer(runtime: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer
    from vllm.tokenizers import get_tokenizer

    folder: Path = tmp_path_factory.mktemp("marked")
    marked = AutoTokenizer.from_pretrained(str(resolve_model("kvasir-tiny")))
    marked.add_tokens(MARKS)
    marked.save_pretrained(folder)
    return get_tokenizer(str(folder))


@dataclass
class Bench:
    """Parsers of one script over the real tokenizer and detokenizer."""

    runtime: Any
    tokenizer: Any
    script: Script
    parsers: Any = field(init=False)
    understood: Any = field(init=False)

    def __post_init__(self) -> None:
        from kvasir_workers.engines.vllm.output.parsing import Parsers

        script = self.script
        self.parsers = Parsers(
            self.tokenizer, None, tool_parser=script.tool_parser, reasoning_parser=script.reasoning_parser
        )
        self.understood = self.parsers.understand(script.parsing, Sampling(), None)

    @property
    def prompt(self) -> list[int]:
        return list(self.tokenizer.encode(self.script.prompt, add_special_tokens=False))

    @property
    def output(self) -> list[int]:
        return list(self.tokenizer.encode(self.script.text, add_special_tokens=False))

    def steps(self, count: int | None = None) -> list[tuple[int, str]]:
        """Each token of the output with the text of its step, as the engine's front gives them."""
        params = self.runtime.SamplingParams(skip_special_tokens=self.understood.skip_special_tokens)
        replay = self.runtime.continuation.replay
        return list(replay(self.tokenizer, params, self.prompt, self.output[:count]))

    def choice(self) -> Any:
        return self.parsers.choice(self.understood, self.prompt)

    def heard(self, size: int = 1) -> list[StepParts]:
        """With `size` tokens a step."""
        return feed(self.choice(), self.steps(), size)


def feed(choice: Any, steps: Sequence[tuple[int, str]], size: int = 1) -> list[StepParts]:
    made = []
    for begin in range(0, len(steps), size):
        some = steps[begin : begin + size]
        text = "".join(piece for _, piece in some)
        made.append(choice.take(text, [token for token, _ in some], finished=begin + size >= len(steps)))
    return made


Joined = tuple[str, str, list[tuple[str, str]]]


def joined(parts: Sequence[StepParts]) -> Joined:
    """Content, reasoning, and each call's name and arguments."""
    calls: dict[int, list[str]] = {}
    for each in parts:
        for piece in each.tool_calls:
            known = calls.setdefault(piece.index, ["", "", ""])
            assert bool(piece.name) == bool(piece.call_id), "a call is named once, together with its id"
            for at, value in enumerate((piece.call_id, piece.name, piece.arguments)):
                known[at] += value
    assert list(calls) == list(range(len(calls)))
    content, reasoning = "".join(p.text for p in parts), "".join(p.reasoning for p in parts)
    return content, reasoning, [(name, arguments) for _, name, arguments in calls.values()]


@pytest.fixture(params=SCRIPTS, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def bench(request: pytest.FixtureRequest, runtime: Any, tokenizer: Any) -> Bench:
    return Bench(runtime, tokenizer, SCRIPTS[request.param])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_the_model_says_is_taken_apart(bench: Bench, size: int) -> None:
    script = bench.script
    parts = bench.heard(size)
    content, reasoning, calls = joined(parts)
    assert (content, reasoning) == (script.content, script.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(script.calls)
    assert sum(each.taken for each in parts) == len("".join(text for _, text in bench.steps()))


def test_a_stream_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(bench: Bench) -> None:
    steps = bench.steps()
    whole = joined(bench.heard())
    for cut in range(1, len(steps)):
        before = [bench.choice()]
        said = [before[0].take(text, [token], finished=False) for token, text in steps[:cut]]
        length = sum(each.taken for each in said)
        there = bench.choice()
        there.prime(bench.steps(cut), length)
        rest = feed(there, steps[cut:])
        assert joined([*said, *rest]) == whole, f"cut after {cut} of {len(steps)} tokens"
        assert sum(each.taken for each in rest) == len("".join(text for _, text in steps[cut:]))


def test_text_that_the_lost_worker_held_back_is_parsed_when_it_comes(runtime: Any, tokenizer: Any) -> None:
    bench = Bench(runtime, tokenizer, SCRIPTS["qwen3 and hermes"])
    steps = bench.steps()
    whole = joined(bench.heard())
    for cut in range(4, len(steps)):
        # The engine's front held the text of the last three steps; its client has that of the others.
        lengths = [len(text) for _, text in steps[:cut]]
        length = sum(lengths[:-3])
        choice = bench.choice()
        said = [choice.take(text, [token], finished=False) for token, text in steps[: cut - 3]]
        there = bench.choice()
        there.prime(bench.steps(cut), length)
        held = "".join(text for _, text in steps[cut - 3 : cut])
        (token, text), *others = steps[cut:]
        rest = feed(there, [(token, held + text), *others])
        assert joined([*said, *rest]) == whole, f"cut after {cut} of {len(steps)} tokens"


def test_long_outputs_are_parsed_several_tokens_at_once(
    runtime: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvasir_workers.engines.vllm.output import parsing

    bench = Bench(runtime, tokenizer, SCRIPTS["hermes"])
    whole = joined(bench.heard())
    steps = bench.steps()
    monkeypatch.setattr(parsing, "_PACE_TOKENS", 8)
    choice = bench.choice()
    paced = feed(choice, steps)
    assert joined(paced) == whole
    silent = [each.taken == 0 and not each.text and not each.tool_calls for each in paced]
    assert sum(silent) > len(steps) // 2
    for cut in range(1, len(steps)):
        length = sum(each.taken for each in paced[:cut])
        there = bench.choice()
        there.prime(bench.steps(cut), length)
        text = "".join(text for _, text in steps)
        (token, _), *others = steps[cut:]
        begin = len("".join(text for _, text in steps[: cut + 1]))
        rest = feed(there, [(token, text[length:begin]), *others])
        assert joined([*paced[:cut], *rest]) == whole, f"cut after {cut} of {len(steps)} tokens"


def test_reasoning_is_counted_in_tokens(runtime: Any, tokenizer: Any) -> None:
    for name in ("deepseek_r1", "qwen3 and hermes", "deepseek_r1, cut short"):
        bench = Bench(runtime, tokenizer, SCRIPTS[name])
        choice = bench.choice()
        feed(choice, bench.steps())
        thought = len(tokenizer.encode(bench.script.reasoning, add_special_tokens=False))
        assert abs(choice.reasoning_tokens() - thought) <= 2, name
    plain = Bench(runtime, tokenizer, SCRIPTS["no parser"])
    assert plain.choice().reasoning_tokens() == 0


def test_a_parser_that_fails_ends_in_plain_text(
    runtime: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(runtime, tokenizer, SCRIPTS["hermes"])
    choice = bench.choice()
    steps = bench.steps()
    said = [choice.take(text, [token], finished=False) for token, text in steps[:3]]

    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("out of my depth")

    choice._parser.parse_delta = fail
    rest = feed(choice, steps[3:])
    content, _, calls = joined([*said, *rest])
    assert content == bench.script.text
    assert calls == []
    failures = [each for each in caplog.records if "plain text" in each.message]
    assert len(failures) == 1


def test_only_the_first_call_is_told_where_only_one_is_wanted(runtime: Any, tokenizer: Any) -> None:
    script = SCRIPTS["no parser, required"]
    one = OutputParsing(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    bench = Bench(runtime, tokenizer, Script(script.text, one))
    _, _, calls = joined(bench.heard())
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [LONDON]


def test_forced_calls_become_a_grammar(runtime: Any, tokenizer: Any) -> None:
    def rule(script: Script) -> Any:
        return Bench(runtime, tokenizer, script).understood.structured

    assert rule(Script("", AUTO, "hermes")) is None
    for tool_parser in (None, "hermes", "qwen3_coder"):
        assert rule(Script("", REQUIRED, tool_parser)).json["minItems"] == 1
        assert rule(Script("", NAMED, tool_parser)).json["required"] == ["city"]
    assert rule(Script("", REQUIRED, "hermes", "qwen3")).json["minItems"] == 1


def test_harmony_has_a_format_of_its_own_for_forced_calls(runtime: Any, tokenizer: Any) -> None:
    from vllm.parser.harmony import HarmonyParser

    from kvasir_workers.engines.vllm.output.parsing import Parsers

    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="gpt_oss"), model="gpt-oss")
    parsers = Parsers(tokenizer, model, tool_parser="openai", reasoning_parser=None)
    assert parsers.understand(REQUIRED, Sampling(), None).parser is HarmonyParser


def test_marks_that_are_special_tokens_are_kept_in_the_text(runtime: Any, tokenizer: Any) -> None:
    assert Bench(runtime, tokenizer, SCRIPTS["hermes"]).understood.skip_special_tokens is False
    assert Bench(runtime, tokenizer, SCRIPTS["no parser"]).understood.skip_special_tokens is True


def test_what_vllm_refuses_is_refused_in_its_words(runtime: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"set engine\.tool_parser"):
        Bench(runtime, tokenizer, Script("", AUTO))
    unknown = OutputParsing(tools=TOOLS, tool_choice="function", function="tides")
    with pytest.raises(ValueError, match="does not match any"):
        Bench(runtime, tokenizer, Script("", unknown, "hermes"))
    nameless = OutputParsing(tools=json.dumps([{"type": "function", "function": {}}]), tool_choice="required")
    with pytest.raises(ValueError, match="name"):
        Bench(runtime, tokenizer, Script("", nameless, "hermes"))


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused(runtime: Any) -> None:
    from vllm.tokenizers import get_tokenizer

    plain = get_tokenizer(str(resolve_model("kvasir-tiny")))
    with pytest.raises(ValueError, match="deepseek_r1"):
        Bench(runtime, plain, Script("", OutputParsing(), None, "deepseek_r1"))


def test_the_names_that_the_spec_knows_are_vllms(runtime: Any) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert sorted(TOOL_PARSERS) == ToolParserManager.list_registered()
    assert sorted(REASONING_PARSERS) == ReasoningParserManager.list_registered()


def test_vllm_keeps_the_parts_that_are_called(runtime: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.parser.abstract_parser import Parser

    def parameters(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert {
        "tool_parser_name",
        "reasoning_parser_name",
        "enable_auto_tools",
        "model_name",
        "is_harmony",
        "tokenizer",
    } <= parameters(ParserManager.get_parser)
    assert {"prompt_token_ids", "finished", "request"} <= parameters(Parser.parse_delta)
    assert {"parser", "prompt_token_ids"} <= parameters(ChatCompletionRequest.resolve_reasoning_ended)
    assert Parser.always_adjust_request is False
    assert "self._engine_based = " in inspect.getsource(Parser.__init__)
