"""What is prepared for a leg, what is cached, and the time limits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import (
    Constraint,
    Continuation,
    EngineRequest,
    Leg,
    OutputParsing,
    Sampling,
    StructuredOutput,
    token_ids,
)
from kvasir_workers.engines.vllm.output.preparing_queue import Busy

pytestmark = pytest.mark.slow

TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
FORCED = OutputParsing(tools=TOOLS, tool_choice="required")
RULE = StructuredOutput(Constraint.REGEX, "a+")


@dataclass
class Rules:
    """Takes every rule, and waits for `gate` first."""

    judged: list[Any] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def vetted(self, params: Any) -> Any:
        self.gate.wait(30)
        self.judged.append(params)
        return params


@dataclass
class Bench:
    """A Preparer over vLLM's parsers, and rules that are not judged."""

    preparer: Any
    rules: Rules

    def request(self, **changes: Any) -> EngineRequest:
        return replace(EngineRequest("r", token_ids([300, 301, 302]), Sampling()), **changes)


@pytest.fixture
def bench() -> Iterator[Bench]:
    pytest.importorskip("vllm")
    from vllm.tokenizers import get_tokenizer

    from kvasir.config.load.model_files import resolve_model
    from kvasir_workers.engines.vllm.output.parsing import Parsers
    from kvasir_workers.engines.vllm.output.preparing import Preparer

    tokenizer = get_tokenizer(str(resolve_model("kvasir-tiny")))
    parsers = Parsers(tokenizer, None, tool_parser="hermes", reasoning_parser="qwen3")
    rules: Any = Rules()
    rules.gate.set()
    made: Any = Preparer(parsers, rules)
    yield Bench(made, rules)
    rules.gate.set()
    made.close()


async def test_a_way_of_asking_is_understood_once(bench: Bench) -> None:
    request = bench.request(parsing=FORCED)
    assert bench.preparer.at_once(request) is None
    first = await bench.preparer.prepare(request)
    again = bench.preparer.at_once(replace(request, request_id="s"))
    assert first.structured is again.structured is not None
    assert len(bench.rules.judged) == 1
    assert first.parsers[0] is not again.parsers[0], "a parser has the state of one choice"
    assert (
        bench.preparer.at_once(replace(request, parsing=replace(FORCED, parallel_tool_calls=False))) is None
    )


async def test_a_rule_is_judged_once(bench: Bench) -> None:
    request = bench.request(sampling=Sampling(structured=RULE))
    assert bench.preparer.at_once(request) is None
    prepared = await bench.preparer.prepare(request)
    assert prepared.structured.regex == "a+"
    assert (prepared.parsers, prepared.reasoning_ended) == ((), True)
    assert bench.preparer.at_once(request).structured is prepared.structured
    assert len(bench.rules.judged) == 1


async def test_a_rule_waits_for_reasoning_only_where_there_is_some(bench: Bench) -> None:
    sampling = Sampling(structured=RULE)
    ended = []
    for kwargs in ("", '{"enable_thinking": false}'):
        request = bench.request(sampling=sampling, parsing=OutputParsing(template_kwargs=kwargs))
        prepared = await bench.preparer.prepare(request)
        ended.append(prepared.reasoning_ended)
        assert prepared.reasoning_parser_kwargs == {"chat_template_kwargs": json.loads(kwargs or "{}")}
    assert ended == [False, True]
    hidden = bench.request(sampling=sampling, parsing=OutputParsing(reasoning=False))
    assert (await bench.preparer.prepare(hidden)).reasoning_ended is True


async def test_each_choice_gets_a_parser(bench: Bench) -> None:
    prepared = await bench.preparer.prepare(bench.request(sampling=Sampling(n=3), parsing=OutputParsing()))
    assert len({id(parser) for parser in prepared.parsers}) == 3


async def test_a_continued_leg_is_always_made_outside_the_loop(bench: Bench) -> None:
    """Its parser takes in all the output that is there, which takes time."""
    request = bench.request(parsing=OutputParsing())
    await bench.preparer.prepare(request)
    assert bench.preparer.at_once(request) is not None
    assert bench.preparer.at_once(replace(request, continuation=Continuation(1, 2))) is None


async def test_what_takes_too_long_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvasir_workers.engines.vllm.output import preparing

    monkeypatch.setattr(preparing, "TIME_LIMIT_S", 0.01)
    bench.rules.gate.clear()
    request = bench.request(sampling=Sampling(structured=RULE))
    with pytest.raises(TimeoutError):
        await bench.preparer.prepare(request)
    with pytest.raises(TimeoutError):
        await bench.preparer.prepare(request)
    with pytest.raises(Busy):
        await bench.preparer.prepare(request)


class Images:
    """Makes nothing of images while `gate` is clear."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def prompt(self, request: EngineRequest, threads: Any) -> str:
        await self.gate.wait()
        return request.request_id


@pytest.mark.soak
async def test_images_of_one_request_at_a_time_are_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvasir_workers.engines.vllm.output import preparing

    taken = (PromptMedia(0, 1, b"digest", b"data"),)
    with pytest.raises(ValueError, match="takes no images"):
        await bench.preparer.prepare(bench.request(media=taken))
    bench.preparer._images = images = Images()
    requests = [
        bench.request(request_id=name, media=taken, leg=leg) for name, leg in zip("ab", Leg, strict=False)
    ]
    assert [bench.preparer.at_once(each) for each in requests] == [None, None]
    both = [asyncio.ensure_future(bench.preparer.prepare(each)) for each in requests]
    images.gate.set()
    assert [(await each).prompt for each in both] == ["a", "b"]
    monkeypatch.setattr(preparing, "TIME_LIMIT_S", 0.05)
    images.gate.clear()
    late = [bench.preparer.prepare(each) for each in requests]
    # The second waits for the first to end, and is told so.
    assert [type(each) for each in await asyncio.gather(*late, return_exceptions=True)] == [
        TimeoutError,
        Busy,
    ]


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm.output import preparing

    monkeypatch.setattr(preparing, "_KEPT", 3)
    monkeypatch.setattr(preparing, "_KEPT_BYTES", 100)
    kept: Any = preparing._Kept()
    for name in "abc":
        kept.keep(name, name, 10)
    assert kept.get("a") == "a"
    kept.keep("d", "d", 10)
    assert [kept.get(name) for name in "abcd"] == ["a", None, "c", "d"]
    kept.keep("e", "e", 85)
    assert [kept.get(name) for name in "acde"] == [None, None, "d", "e"]
