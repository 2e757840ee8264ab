"""Contract of engines for requests whose output is parsed."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.recorder import Choice, FullRecorder, Recorded
from tests.kit.models.tiny_tokens import WHITE

from kvasir.core.requests import Continuation, Delta, FinishReason, Leg, OutputParsing, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"words": {"enum": [f"{name} is near", f"{name} is far"]}},
                    "required": ["words"],
                    "additionalProperties": False,
                },
            },
        }
        for name in ("sea", "hill")
    ]
)
REQUIRED = OutputParsing(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
NAMED = OutputParsing(tools=TOOLS, tool_choice="function", function="hill")
PLAIN = OutputParsing()
NO_WHITE = tuple((token, -100.0) for token in WHITE)
GREEDY = Sampling(temperature=0.0, max_tokens=200, logit_bias=NO_WHITE)


@pytest.fixture(scope="module")
def prompts() -> FreshPrompts:
    return FreshPrompts(random.Random(31))


@pytest.fixture
def bench(pair: list[EngineBench]) -> EngineBench:
    """The engine without parsers of its own."""
    return pair[0]


def fresh(prompts: FreshPrompts) -> list[int]:
    """It ends with a whole character: after a half one, vLLM tells the prompt's text again."""
    return [*prompts.fresh(40), 70]


async def parsed(
    bench: EngineBench, prompt: list[int], parsing: OutputParsing | None, sampling: Sampling = GREEDY
) -> tuple[Recorded, list[Delta]]:
    request = replace(bench.request(prompt, sampling), parsing=parsing)
    (done,) = await bench.run(request)
    assert done.last is not None
    assert done.last.error is None, done.last.error_message
    assert isinstance(bench.recorder, FullRecorder)
    return done, bench.recorder.deltas[request.request_id]


def calls(choice: Choice) -> list[tuple[str, dict[str, str]]]:
    return [(name, json.loads(arguments)) for _, name, arguments in choice.calls.values()]


@pytest.mark.parametrize("parsing", [REQUIRED, NAMED], ids=["required", "named"])
async def test_a_forced_call_is_made(
    bench: EngineBench, prompts: FreshPrompts, parsing: OutputParsing
) -> None:
    done, _ = await parsed(bench, fresh(prompts), parsing)
    ((name, arguments),) = calls(done.choice())
    assert name == "hill" if parsing is NAMED else name in ("sea", "hill")
    assert list(arguments) == ["words"]
    assert done.choice().text == ""
    assert done.choice().finish is FinishReason.STOP


async def test_text_without_marks_is_content(bench: EngineBench, prompts: FreshPrompts) -> None:
    prompt, sampling = fresh(prompts), replace(GREEDY, max_tokens=20, ignore_eos=True, stop=("never said",))
    done, deltas = await parsed(bench, prompt, PLAIN, sampling)
    bare, _ = await parsed(bench, prompt, None, sampling)
    assert (done.choice().text, done.choice().tokens) == (bare.choice().text, bare.choice().tokens)
    assert done.choice().taken == len(bare.choice().text)
    assert bare.choice().taken is None
    assert all(delta.raw_length == len(delta.text) for delta in deltas)


async def test_every_choice_is_taken_apart_by_itself(bench: EngineBench, prompts: FreshPrompts) -> None:
    done, _ = await parsed(bench, fresh(prompts), REQUIRED, replace(GREEDY, temperature=1.0, n=3))
    assert sorted(done.choices) == [0, 1, 2]
    for choice in done.choices.values():
        assert len(calls(choice)) == 1


async def test_a_prefill_leg_takes_nothing_apart(bench: EngineBench, prompts: FreshPrompts) -> None:
    request = bench.request(fresh(prompts), GREEDY, leg=Leg.PREFILL)
    (done,) = await bench.run(replace(request, parsing=REQUIRED))
    assert done.last is not None
    assert done.last.handoff is not None
    assert done.choice().taken is None


@pytest.mark.parametrize("parsing", [REQUIRED, NAMED, PLAIN], ids=["required", "named", "plain"])
async def test_a_parsed_stream_goes_on_wherever_it_was_cut(
    bench: EngineBench, prompts: FreshPrompts, parsing: OutputParsing
) -> None:
    prompt = fresh(prompts)
    # Held back for a stop string, text and tokens part company.
    sampling = replace(GREEDY, max_tokens=90, stop=("never said",))
    done, deltas = await parsed(bench, prompt, parsing, sampling)
    whole = done.choice()
    for cut in range(1, len(deltas)):
        count = sum(len(delta.token_ids) for delta in deltas[:cut])
        length = sum(delta.raw_length or 0 for delta in deltas[:cut])
        request = bench.request([*prompt, *whole.tokens[:count]], sampling)
        had = bench.recorder.request(request.request_id).choice()
        had.tokens = whole.tokens[:count]
        for delta in deltas[:cut]:
            had.text += delta.text
            had.taken = length
            for piece in delta.tool_calls:
                call = had.calls.setdefault(piece.index, ["", "", ""])
                for at, value in enumerate((piece.call_id, piece.name, piece.arguments)):
                    call[at] += value
        continued = replace(request, parsing=parsing, continuation=Continuation(count, length))
        (rest,) = await bench.run(continued)
        assert rest.last is not None
        assert rest.last.error is None, rest.last.error_message
        choice = rest.choice()
        assert (choice.tokens, choice.text, choice.taken) == (whole.tokens, whole.text, whole.taken), cut
        assert calls(choice) == calls(whole), cut
        assert choice.finish is whole.finish
