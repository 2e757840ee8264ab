"""Contract of engines for a stream that another engine of the same deployment began."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.recorder import Choice, FullRecorder, Recorded

from kvasir.core.requests import Continuation, Delta, FinishReason, KvHandoff, Leg, Sampling, Usage

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Bytes of é, ö, 日 and an emoji in the tokenizer of kvasir-tiny, one a token: whole characters and halves.
MANY_BYTES = tuple((token, 20.0) for token in (135, 110, 122, 170, 253, 106, 180, 261, 254, 230))


@dataclass
class Whole:
    """A stream that nothing interrupted. `after` is what its client had after each delta."""

    prompt: list[int]
    sampling: Sampling
    choice: Choice
    after: list[tuple[int, int]]

    @property
    def cuts(self) -> list[int]:
        """Deltas after which to cut: the first, the last but one, and some between."""
        middle = range(2, len(self.after) - 1, max(1, len(self.after) // 5))
        return sorted({1, *middle, len(self.after) - 1})


@dataclass
class Worker:
    """An engine and who listens to it."""

    bench: EngineBench
    client: FullRecorder

    async def whole(self, prompt: list[int], sampling: Sampling) -> Whole:
        request = self.bench.request(prompt, sampling)
        (done,) = await self.bench.run(request)
        return Whole(prompt, sampling, done.choice(), self.client.after[request.request_id])

    async def go_on(
        self, whole: Whole, cut: int, *, leg: Leg = Leg.FULL, handoff: KvHandoff | None = None
    ) -> Recorded:
        """What the client has in the end, who had heard `cut` deltas of `whole` from elsewhere."""
        count, length = whole.after[cut - 1]
        tokens = [*whole.prompt, *whole.choice.tokens[:count]]
        request = replace(
            self.bench.request(tokens, whole.sampling, leg=leg, handoff=handoff),
            continuation=Continuation(count, length),
        )
        had = self.client.request(request.request_id).choice()
        had.tokens = whole.choice.tokens[:count]
        had.text = whole.choice.text[:length]
        had.logprobs = whole.choice.logprobs[:count]
        (done,) = await self.bench.run(request)
        assert self.client.violations == []
        assert usage(done).prompt_tokens == len(tokens)
        assert usage(done).output_tokens == len(done.choice().tokens) - count
        return done


def last(done: Recorded) -> Delta:
    assert done.last is not None
    return done.last


def usage(done: Recorded) -> Usage:
    found = last(done).usage
    assert found is not None
    return found


def must_equal(choice: Choice, whole: Choice) -> None:
    """The same, but for the last digits of log-probabilities: other batches round otherwise."""
    assert (choice.tokens, choice.text) == (whole.tokens, whole.text)
    assert (choice.finish, choice.stop_reason) == (whole.finish, whole.stop_reason)
    assert len(choice.logprobs) == len(whole.logprobs)
    for got, expected in zip(choice.logprobs, whole.logprobs, strict=True):
        for one, other in zip((got.sampled, *got.top), (expected.sampled, *expected.top), strict=True):
            assert (one.token_id, one.token) == (other.token_id, other.token)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def worker(bench: EngineBench) -> Worker:
    assert isinstance(bench.recorder, FullRecorder)
    return Worker(bench, bench.recorder)


@pytest.fixture
def lost(prefill: EngineBench) -> Worker:
    """Where streams begin; it prefills for the other, too."""
    return worker(prefill)


@pytest.fixture
def next_(bench: EngineBench) -> Worker:
    """Where they go on."""
    return worker(bench)


@pytest.fixture(scope="module")
def prompts() -> FreshPrompts:
    return FreshPrompts(random.Random(23))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"logprobs": 3},
        {"max_tokens": 24, "ignore_eos": False},
        {"repetition_penalty": 1.3},
        {"min_tokens": 9, "stop_token_ids": tuple(range(500, 4096, 2))},
        {"logit_bias": MANY_BYTES, "repetition_penalty": 1.3, "logprobs": 2, "max_tokens": 24},
    ],
    ids=lambda change: "-".join(change) or "greedy",
)
async def test_a_stream_goes_on_as_if_nothing_had_happened(
    lost: Worker, next_: Worker, prompts: FreshPrompts, change: dict[str, Any]
) -> None:
    whole = await lost.whole(prompts.fresh(45), prompts.sampling(**change))
    for cut in whole.cuts:
        must_equal((await next_.go_on(whole, cut)).choice(), whole.choice)


@pytest.mark.parametrize("shown", [False, True])
async def test_a_stop_string_across_the_cut_ends_the_text_before_it(
    lost: Worker, next_: Worker, prompts: FreshPrompts, shown: bool
) -> None:
    prompt = prompts.fresh(45)
    free = await lost.whole(prompt, prompts.sampling(max_tokens=20))
    # From within one token's text to within another's, six tokens later.
    begin, end = free.after[8][1] - 1, free.after[14][1] - 1
    stop = free.choice.text[begin:end]
    whole = await lost.whole(
        prompt, prompts.sampling(max_tokens=20, stop=(stop,), include_stop_str_in_output=shown)
    )
    assert (whole.choice.finish, whole.choice.stop_reason) == (FinishReason.STOP, stop)
    assert 10 < len(whole.choice.tokens) <= 16
    for cut in range(7, len(whole.after)):
        must_equal((await next_.go_on(whole, cut)).choice(), whole.choice)


async def test_text_that_was_held_back_comes_out_elsewhere(
    lost: Worker, next_: Worker, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(45)
    text = (await lost.whole(prompt, prompts.greedy)).choice.text
    # All of the text may be the beginning of this one, and in the end it is not.
    whole = await lost.whole(prompt, prompts.sampling(stop=(text + "!",)))
    assert [length for _, length in whole.after[:-1]] == [0] * 11
    for cut in whole.cuts:
        must_equal((await next_.go_on(whole, cut)).choice(), whole.choice)


async def test_what_was_prefilled_elsewhere_with_its_output_goes_on(
    lost: Worker, next_: Worker, prompts: FreshPrompts
) -> None:
    whole = await lost.whole(prompts.fresh(70), prompts.sampling(logprobs=1, max_tokens=40))
    for count in (1, 20, 39):
        tokens = [*whole.prompt, *whole.choice.tokens[:count]]
        offered = await lost.bench.generate(tokens, prompts.greedy, leg=Leg.PREFILL)
        assert last(offered).offset == 0
        done = await next_.go_on(whole, count, leg=Leg.DECODE, handoff=last(offered).handoff)
        must_equal(done.choice(), whole.choice)
        assert usage(done).transferred_tokens + usage(done).cached_tokens > 60


async def test_a_draw_without_a_seed_goes_on_to_its_limit(
    lost: Worker, next_: Worker, prompts: FreshPrompts
) -> None:
    whole = await lost.whole(prompts.fresh(30), prompts.sampling(temperature=1.0, max_tokens=16))
    done = await next_.go_on(whole, 5)
    assert len(done.choice().tokens) == 16
    assert done.choice().finish is FinishReason.LENGTH


async def test_many_streams_go_on_at_once_beside_others(
    lost: Worker, next_: Worker, prompts: FreshPrompts
) -> None:
    begun = [await lost.whole(prompts.fresh(20 + 9 * number), prompts.greedy) for number in range(8)]
    fresh = next_.bench.generate(prompts.fresh(60), prompts.greedy)
    stranger, *ended = await asyncio.gather(fresh, *(next_.go_on(whole, 4) for whole in begun))
    assert len(stranger.choice().tokens) == 12
    for done, whole in zip(ended, begun, strict=True):
        must_equal(done.choice(), whole.choice)


async def test_a_continuation_with_nothing_left_to_generate_is_refused(
    next_: Worker, prompts: FreshPrompts
) -> None:
    request = next_.bench.request(prompts.fresh(50), prompts.sampling(max_tokens=12))
    next_.client.request(request.request_id).choice().tokens = [7] * 12
    (done,) = await next_.bench.run(replace(request, continuation=Continuation(12, 30)))
    assert (last(done).finish, last(done).error) == (FinishReason.ERROR, "invalid_request")
    assert "max_tokens is 12" in str(last(done).error_message)


async def test_a_continuation_whose_text_is_longer_than_its_tokens_is_refused(
    next_: Worker, prompts: FreshPrompts
) -> None:
    request = next_.bench.request(prompts.fresh(50), prompts.greedy)
    next_.client.request(request.request_id).choice().tokens = [7, 7]
    (done,) = await next_.bench.run(replace(request, continuation=Continuation(2, 5000)))
    assert (last(done).finish, last(done).error) == (FinishReason.ERROR, "invalid_request")
    assert "the client has 5000 characters" in str(last(done).error_message)
