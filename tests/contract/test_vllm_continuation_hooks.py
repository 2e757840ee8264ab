"""Internals of vLLM's front end that continuation.py depends on: a continued request must read as if never
interrupted.

The control is vLLM's own output processor, untouched, fed with the whole output; no engine runs.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir.core.requests import Continuation, EngineRequest, Sampling, token_ids

pytestmark = pytest.mark.slow

PROMPT = "In the beginning"
# Two, three and four bytes a character, each of a token of its own; a lone byte that is no character.
OUTPUTS = {
    "plain": " And it came to pass, that the word of the LORD came unto him.",
    "many bytes": " naïve wörld 😀😀 日本語 é",
    "joined": " 👩‍👩‍👧 fin",
}
BROKEN = [228, 180, 261, 300, 254, 135, 310, 135]
STOPS: tuple[tuple[str, ...], ...] = (
    (),
    ("came to pass",),
    ("of the LORD", "unto"),
    ("ö",),
    ("😀 日", "語 "),
    ("nothing like this at all", "😀😀"),
)


@pytest.fixture(scope="module")
def tokenizer(runtime: Any) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(resolve_model("kvasir-tiny")))


@dataclass
class Heard:
    """What one processor put out, step by step; `after` is how much there was after each step."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[tuple[list[int], str]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    end: tuple[str | None, Any] = (None, None)

    def put(self, output: Any) -> None:
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        self.tokens += ids
        self.text += completion.text
        self.steps.append((ids, completion.text))
        self.after.append((len(self.tokens), len(self.text)))
        self.logprobs += completion.logprobs or []
        self.end = (completion.finish_reason, completion.stop_reason)


@dataclass
class Front:
    """vLLM's output processor over the real tokenizer. `step` is how many tokens the core makes at once."""

    runtime: Any
    tokenizer: Any
    step: int = 1

    def feed(
        self, prompt: list[int], output: list[int], sampling: Sampling, continuation: Continuation | None
    ) -> Heard:
        """`output`, as the core would report it after `prompt`, until a stop string or its end."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
        from vllm.v1.outputs import LogprobsLists

        request = EngineRequest("r", token_ids(prompt), sampling, continuation=continuation)
        params = self.runtime.sampling_params(request, lease_id="l", fence=1, lease_s=1.0)
        values = dict.fromkeys(inspect.signature(EngineCoreRequest).parameters)
        values |= {
            "request_id": "r-1",
            "external_req_id": "r",
            "prompt_token_ids": list(prompt),
            "sampling_params": params,
            "arrival_time": 0.0,
            "resumable": False,
        }
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        if continuation is not None:
            self.runtime.continuation.install(processor)
        heard = Heard()
        collector = RequestOutputCollector(params.output_kind, "r-1")
        collector.put = heard.put
        processor.add_request(EngineCoreRequest(**values), None, None, 0, collector)
        for begin in range(0, len(output), self.step):
            some = output[begin : begin + self.step]
            ended = FinishReason.LENGTH if begin + self.step >= len(output) else None
            candidates = np.array([[token, 135, 228] for token in some])
            ranked = LogprobsLists(candidates, -candidates / 1000, np.ones(len(some), dtype=int))
            made = EngineCoreOutput(request_id="r-1", new_token_ids=some, finish_reason=ended)
            made.new_logprobs = None if sampling.logprobs is None else ranked
            processor.process_outputs([made])
            if heard.end[0] is not None:
                break
        return heard

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("output", [*OUTPUTS, "broken"])
def test_a_continued_request_reads_as_if_it_had_not_been_cut(
    runtime: Any, tokenizer: Any, output: str, stop: tuple[str, ...], step: int
) -> None:
    front = Front(runtime, tokenizer, step)
    prompt = front.encode(PROMPT)
    tokens = BROKEN if output == "broken" else front.encode(OUTPUTS[output])
    for shown in (False, True):
        for least in (0, 9):
            sampling = Sampling(
                temperature=0.0,
                max_tokens=len(tokens),
                min_tokens=min(least, len(tokens)),
                stop=stop,
                include_stop_str_in_output=shown,
                logprobs=2,
            )
            whole = front.feed(prompt, tokens, sampling, None)
            for cut, (count, length) in enumerate(whole.after[:-1], 1):
                rest = front.feed(
                    [*prompt, *tokens[:count]], tokens[count:], sampling, Continuation(count, length)
                )
                assert rest.steps == whole.steps[cut:], f"after {count} tokens, shown {shown}, least {least}"
                assert rest.end == whole.end
                assert rest.logprobs == whole.logprobs[count:]


def test_the_outputs_try_what_they_are_meant_to(runtime: Any, tokenizer: Any) -> None:
    front = Front(runtime, tokenizer)
    prompt = front.encode(PROMPT)
    many = front.encode(OUTPUTS["many bytes"])
    free = front.feed(prompt, many, Sampling(max_tokens=99), None)
    assert free.text == OUTPUTS["many bytes"]
    assert sum(text == "" for _, text in free.steps) > 5, "no character is cut between its bytes"
    stopped = front.feed(prompt, many, Sampling(max_tokens=99, stop=("😀 日", "語 ")), None)
    assert stopped.end == ("stop", "😀 日")
    assert stopped.text == " naïve wörld 😀"


def test_the_replaced_add_request_leaves_other_requests_alone(runtime: Any, tokenizer: Any) -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(tokenizer, log_stats=False)
    seen: list[Any] = []
    processor.add_request = lambda *args, **kwargs: seen.append((args, kwargs))
    runtime.continuation.install(processor)
    for params in (None, runtime.SamplingParams(), runtime.SamplingParams(extra_args={"other": 1})):
        request = type("Request", (), {"sampling_params": params})()
        processor.add_request(request, "p", None, 0, queue=None)
        assert seen.pop() == ((request, "p", None, 0), {"queue": None})


def test_a_continuation_that_its_tokens_contradict_adds_nothing(runtime: Any, tokenizer: Any) -> None:
    front = Front(runtime, tokenizer)
    tokens = front.encode(PROMPT + OUTPUTS["plain"])
    with pytest.raises(ValueError, match="the client has 500 characters"):
        front.feed(tokens, [5], Sampling(max_tokens=99), Continuation(3, 500))


def test_limits_count_what_is_there(runtime: Any) -> None:
    def made(**sampling: Any) -> Any:
        request = EngineRequest(
            "r", token_ids([1, 2, 3]), Sampling(**sampling), continuation=Continuation(2, 7)
        )
        return runtime.sampling_params(request, lease_id="l", fence=1, lease_s=1.0)

    params = made(max_tokens=9, min_tokens=5)
    assert (params.max_tokens, params.min_tokens) == (7, 3)
    assert params.extra_args == {"kvasir_continuation": [2, 7]}
    assert (made().max_tokens, made(min_tokens=1).min_tokens) == (None, 0)


def test_vllm_keeps_the_parts_that_are_replaced_or_read(runtime: Any, tokenizer: Any) -> None:
    from vllm.v1.engine import detokenizer, logprobs, output_processor
    from vllm.v1.engine.async_llm import AsyncLLM

    def parameters(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    processor = output_processor.OutputProcessor
    assert "request" in parameters(processor.add_request)
    assert processor(tokenizer, log_stats=False).stream_interval == 1, "steps are gathered, and told again"
    assert {"tokenizer", "request"} <= parameters(detokenizer.IncrementalDetokenizer.from_new_request)
    assert detokenizer.uses_fast_detokenizer(tokenizer), "another detokenizer reads this model's tokens"
    for kind, attributes in (
        (processor, ("self.request_states", "self.tokenizer")),
        (output_processor.RequestState, ("self.detokenizer", "self.logprobs_processor")),
        (
            detokenizer.BaseIncrementalDetokenizer,
            ("self.min_tokens", "self.output_text", "self._last_output_text_offset"),
        ),
        (logprobs.LogprobsProcessor, ("max_context: int = 4", "self.logprobs")),
        (AsyncLLM, ("self.output_processor.add_request(",)),
    ):
        source = inspect.getsource(kind)
        for attribute in attributes:
            assert attribute in source, f"{kind.__name__} lost `{attribute}`; see continuation.py"
