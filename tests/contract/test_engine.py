"""Contract of all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench, stops_silently
from tests.kit.engines.kv_follower import KvFollower
from tests.kit.engines.recorder import Recorded
from tests.kit.shared.specs import BLOCK, CONTEXT

from kvasir.core.requests import Delta, EngineLoad, FinishReason, KvHandoff, Leg, Role, Timings, Usage
from kvasir.ports.engine import Engine

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _last(recorded: Recorded) -> Delta:
    assert recorded.last is not None
    return recorded.last


def _usage(recorded: Recorded) -> Usage:
    usage = _last(recorded).usage
    assert usage is not None
    return usage


def _handoff(recorded: Recorded) -> KvHandoff:
    handoff = _last(recorded).handoff
    assert handoff is not None
    return handoff


async def follow(bench: EngineBench) -> KvFollower:
    assert bench.engine.kv is not None
    follower = KvFollower(bench.identity, bench.engine.kv)
    await follower.catch_up()
    return follower


def computed(follower: KvFollower, prompt: list[int], done: Recorded, salt: str = "") -> bool:
    """Whether all that has KV is reported: everything but the last token."""
    tokens = [*prompt, *done.choice().tokens][:-1]
    return follower.blocks(tokens, salt=salt) == len(tokens) // BLOCK


async def test_identity_says_what_was_deployed(bench: EngineBench, prompts: FreshPrompts) -> None:
    identity = bench.identity
    assert (identity.worker_id, identity.epoch) == ("decode-0", 1)
    assert (identity.pool, identity.role) == ("decode", Role.DECODE)
    assert identity.max_model_len == CONTEXT
    assert identity.kv.block_size == BLOCK
    assert identity.kv_blocks * BLOCK >= CONTEXT
    assert identity.kv.bytes_per_block > 0


async def test_peers_can_exchange_kv(bench: EngineBench, prefill: EngineBench) -> None:
    assert bench.identity.kv.differences(prefill.identity.kv) == []
    assert bench.identity.transfer == prefill.identity.transfer != ""


async def test_max_tokens_is_exact_and_ends_with_length(bench: EngineBench, prompts: FreshPrompts) -> None:
    for count in (1, 2, 33):
        # It ends with a whole character, as the first token after a half one may be half of one too.
        done = await bench.generate([*prompts.fresh(39), 70], prompts.sampling(max_tokens=count))
        assert len(done.choice().tokens) == count
        assert done.choice().finish is FinishReason.LENGTH
        assert done.choice().text != ""


async def test_output_without_a_limit_ends_at_the_context(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate(prompts.fresh(CONTEXT - 5), prompts.sampling(max_tokens=None))
    assert done.choice().finish is FinishReason.LENGTH
    assert len(done.choice().tokens) == 5


async def test_usage_counts_what_was_there(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate(prompts.fresh(70), prompts.sampling(max_tokens=7))
    usage = _usage(done)
    assert (usage.prompt_tokens, usage.output_tokens) == (70, 7)
    assert (usage.cached_tokens, usage.transferred_tokens, usage.transferred_bytes) == (0, 0, 0)


async def test_timings_come_with_the_last_delta(bench: EngineBench, prompts: FreshPrompts) -> None:
    timings = _last(await bench.generate(prompts.fresh(70), prompts.greedy)).timings
    assert isinstance(timings, Timings)
    assert timings.prefill_s > 0.0
    assert timings.decode_s > 0.0
    assert timings.queue_s >= 0.0
    assert timings.transfer_s == 0.0


async def test_greedy_equals_greedy(bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(50)
    first = await bench.generate(prompt, prompts.greedy)
    again = await bench.generate(prompt, prompts.greedy)
    elsewhere = await prefill.generate(prompt, prompts.greedy)
    assert first.choice().tokens == again.choice().tokens == elsewhere.choice().tokens
    assert first.choice().text == again.choice().text == elsewhere.choice().text


async def test_a_seed_repeats_and_another_seed_differs(bench: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(50)

    async def sampled(seed: int) -> list[int]:
        sampling = prompts.sampling(temperature=1.5, seed=seed, max_tokens=20)
        tokens: list[int] = (await bench.generate(prompt, sampling)).choice().tokens
        return tokens

    assert await sampled(1) == await sampled(1)
    assert await sampled(1) != await sampled(2)


async def test_a_request_continues_from_prompt_and_emitted_tokens(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(45)
    whole = (await bench.generate(prompt, prompts.sampling(max_tokens=12))).choice().tokens
    rest = await bench.generate(prompt + whole[:5], prompts.sampling(max_tokens=7))
    assert rest.choice().tokens == whole[5:]


async def test_a_stop_token_ends_the_output_and_is_its_last_token(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(50)
    free = (await bench.generate(prompt, prompts.greedy)).choice().tokens
    stop = free[4]
    done = await bench.generate(prompt, prompts.sampling(stop_token_ids=(stop,)))
    assert done.choice().tokens == free[: free.index(stop) + 1]
    assert done.choice().finish is FinishReason.STOP
    assert done.choice().stop_reason == str(stop)


async def test_min_tokens_holds_a_stop_token_off(bench: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(50)
    free = (await bench.generate(prompt, prompts.greedy)).choice().tokens
    done = await bench.generate(prompt, prompts.sampling(stop_token_ids=(free[0],), min_tokens=5))
    assert len(done.choice().tokens) >= 5
    assert free[0] not in done.choice().tokens[:5]


async def test_a_stop_string_ends_the_text_before_it(bench: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(50)
    text = (await bench.generate(prompt, prompts.greedy)).choice().text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    done = await bench.generate(prompt, prompts.sampling(stop=(stop,)))
    assert done.choice().finish is FinishReason.STOP
    assert done.choice().stop_reason == stop
    assert done.choice().text == text[: text.index(stop)]


async def test_a_stop_string_is_shown_when_asked_for(bench: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(50)
    text = (await bench.generate(prompt, prompts.greedy)).choice().text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    done = await bench.generate(prompt, prompts.sampling(stop=(stop,), include_stop_str_in_output=True))
    assert done.choice().text == text[: text.index(stop)] + stop


async def test_n_gives_that_many_choices_and_one_end(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate(prompts.fresh(50), prompts.sampling(n=2, temperature=1.5, seed=3))
    assert sorted(done.choices) == [0, 1]
    assert all(len(choice.tokens) == 12 for choice in done.choices.values())
    assert done.choice(0).tokens != done.choice(1).tokens
    assert _usage(done).output_tokens == 24


async def test_logprobs_come_one_per_token_with_the_alternatives_asked_for(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    choice = (await bench.generate(prompts.fresh(50), prompts.sampling(logprobs=3))).choice()
    assert len(choice.logprobs) == len(choice.tokens) == 12
    for token, position in zip(choice.tokens, choice.logprobs, strict=True):
        values = [candidate.logprob for candidate in position.top]
        assert position.sampled.token_id == token
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0.0
        assert position.top[0].token_id == token


async def test_without_logprobs_none_come(bench: EngineBench, prompts: FreshPrompts) -> None:
    assert (await bench.generate(prompts.fresh(50), prompts.greedy)).choice().logprobs == []


async def test_a_live_id_is_refused_and_the_first_request_goes_on(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    request = bench.request(prompts.fresh(50), prompts.sampling(max_tokens=40))
    refused_before = len(bench.recorder.duplicates)
    bench.engine.submit([request])
    bench.engine.submit([request])
    done = await bench.ended(request.request_id)
    (refusal,) = bench.recorder.duplicates[refused_before:]
    assert refusal.request_id == request.request_id
    assert refusal.last
    assert refusal.finish is FinishReason.ERROR
    assert len(done.choice().tokens) == 40


async def test_an_id_may_be_used_again_after_its_end(bench: EngineBench, prompts: FreshPrompts) -> None:
    request = bench.request(prompts.fresh(50), prompts.greedy)
    await bench.run(request)
    del bench.recorder.requests[request.request_id]
    (again,) = await bench.run(request)
    assert again.choice().finish is FinishReason.LENGTH


async def test_a_prompt_beyond_the_context_is_refused(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate(prompts.fresh(CONTEXT), prompts.greedy)
    assert _last(done).finish is FinishReason.ERROR
    assert _last(done).error == "context_length_exceeded"
    assert _last(done).error_message
    assert done.choice().tokens == []


async def test_an_empty_prompt_is_refused(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate([], prompts.greedy)
    assert (_last(done).finish, _last(done).error) == (FinishReason.ERROR, "invalid_request")


async def test_a_decode_leg_without_its_handoff_is_refused(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate(prompts.fresh(40), prompts.greedy, leg=Leg.DECODE)
    assert (_last(done).finish, _last(done).error) == (FinishReason.ERROR, "invalid_request")


async def test_submit_and_abort_never_call_the_sink_themselves(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    before = bench.recorder.batches
    bad = bench.request([], prompts.greedy)
    good = bench.request(prompts.fresh(40), prompts.greedy)
    bench.engine.submit([bad, good])
    bench.engine.abort([good.request_id])
    assert bench.recorder.batches == before
    await bench.ended(bad.request_id)
    await bench.ended(good.request_id)


async def test_an_abort_in_mid_stream_ends_with_abort_and_frees_everything(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    request = bench.request(prompts.fresh(50), prompts.sampling(max_tokens=400))
    bench.engine.submit([request])
    await bench.first_delta(request.request_id)
    bench.engine.abort([request.request_id])
    done = await bench.ended(request.request_id)
    assert _last(done).finish is FinishReason.ABORT
    assert len(done.choice().tokens) < 400
    load = bench.engine.load()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


async def test_an_abort_before_the_first_step_ends_with_abort(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    request = bench.request(prompts.fresh(50), prompts.greedy)
    bench.engine.submit([request])
    bench.engine.abort([request.request_id])
    assert _last(await bench.ended(request.request_id)).finish is FinishReason.ABORT


async def test_unknown_and_ended_ids_are_ignored(bench: EngineBench, prompts: FreshPrompts) -> None:
    request = bench.request(prompts.fresh(40), prompts.greedy)
    await bench.run(request)
    bench.engine.abort(["never-seen", request.request_id])
    bench.engine.release(["no-such-lease"])
    await bench.generate(prompts.fresh(40), prompts.greedy)
    assert _last(bench.recorder.request(request.request_id)).finish is FinishReason.LENGTH


async def test_many_at_once_all_end_with_their_own_tokens(bench: EngineBench, prompts: FreshPrompts) -> None:
    inputs = [prompts.fresh(5 + 7 * number) for number in range(40)]
    together = await bench.run(*(bench.request(prompt, prompts.greedy) for prompt in inputs))
    for number in (0, 13, 39):
        alone = await bench.generate(inputs[number], prompts.greedy)
        assert alone.choice().tokens == together[number].choice().tokens
    assert all(done.choice().finish is FinishReason.LENGTH for done in together)
    load = bench.engine.load()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


async def test_the_second_same_prompt_reports_cached_tokens(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(100)
    cold = await bench.generate(prompt, prompts.greedy)
    warm = await bench.generate(prompt, prompts.greedy)
    assert _usage(cold).cached_tokens == 0
    assert _usage(warm).cached_tokens == 96
    assert warm.choice().tokens == cold.choice().tokens


async def test_the_first_tokens_tell_what_was_cached_to_whoever_ends_the_request_early(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(100)
    cold = await bench.generate(prompt, prompts.sampling(max_tokens=4))
    warm = await bench.generate(prompt, prompts.sampling(max_tokens=4))
    assert cold.first_usage is None
    assert warm.first_usage is not None
    assert (warm.first_usage.prompt_tokens, warm.first_usage.cached_tokens) == (100, 96)


async def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_block(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(2 * BLOCK)
    cold = await bench.generate(prompt, prompts.greedy)
    warm = await bench.generate(prompt, prompts.greedy)
    assert _usage(warm).cached_tokens == BLOCK
    assert warm.choice().tokens == cold.choice().tokens


async def test_another_salt_shares_no_cache(bench: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(100)
    await bench.generate(prompt, prompts.greedy, salt="a")
    assert _usage(await bench.generate(prompt, prompts.greedy, salt="b")).cached_tokens == 0
    assert _usage(await bench.generate(prompt, prompts.greedy, salt="a")).cached_tokens == 96


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 200, 511])
async def test_prefill_then_decode_gives_the_tokens_of_full(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts, length: int
) -> None:
    prompt = prompts.fresh(length)
    offered = await prefill.generate(prompt, prompts.greedy, leg=Leg.PREFILL)
    handoff = _handoff(offered)
    assert offered.choice().tokens == []
    assert offered.choice().text == ""
    assert handoff.ttl_s > 0
    decoded = await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=handoff)
    usage = _usage(decoded)
    full = await prefill.generate(prompt, prompts.greedy)
    assert decoded.choice().tokens == full.choice().tokens
    assert usage.cached_tokens == 0
    # The last token is computed again, so that a block which holds only it is not missing.
    assert usage.transferred_bytes == -(-(length - 1) // BLOCK) * bench.identity.kv.bytes_per_block
    assert usage.transferred_tokens <= length
    assert (usage.transferred_tokens > 0) == (usage.transferred_bytes > 0)


@pytest.mark.parametrize("length", [129, 300, 500])
async def test_a_prompt_of_several_chunks_is_handed_off_early_and_its_decode_gives_the_same_tokens(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts, length: int
) -> None:
    prompt = prompts.fresh(length)
    request = prefill.request(prompt, prompts.greedy, leg=Leg.PREFILL)
    prefill.engine.submit([request])
    offered = await prefill.first_delta(request.request_id)
    early = offered.offered
    assert early is not None
    decoded = await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=early)
    prefilled = await prefill.ended(request.request_id)
    assert prefilled.deltas == 2
    assert early.lease_id == _handoff(prefilled).lease_id
    full = await prefill.generate(prompt, prompts.greedy)
    assert decoded.choice().tokens == full.choice().tokens
    assert _usage(decoded).transferred_bytes == -(-(length - 1) // BLOCK) * bench.identity.kv.bytes_per_block
    assert (await _until_nothing_is_leased(prefill, prompts)).kv_blocks_leased == 0


async def test_a_prompt_that_is_aborted_after_its_early_hand_off_leaves_nothing_behind(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(500)
    request = prefill.request(prompt, prompts.greedy, leg=Leg.PREFILL)
    prefill.engine.submit([request])
    offered = await prefill.first_delta(request.request_id)
    prefill.engine.abort([request.request_id])
    decoded = await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=offered.offered)
    full = await bench.generate(prompt, prompts.greedy)
    assert decoded.choice().tokens == full.choice().tokens
    await prefill.ended(request.request_id)
    assert (await _until_nothing_is_leased(prefill, prompts)).kv_blocks_leased == 0
    assert prefill.engine.load().kv_usage == 0.0


async def test_only_missing_blocks_are_moved(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts
) -> None:
    head = prompts.fresh(64)
    await bench.generate(head + prompts.fresh(10), prompts.greedy)
    prompt = head + prompts.fresh(36)
    offered = await prefill.generate(prompt, prompts.greedy, leg=Leg.PREFILL)
    decoded = await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=_handoff(offered))
    usage = _usage(decoded)
    assert usage.cached_tokens == 64
    assert usage.transferred_bytes == 2 * bench.identity.kv.bytes_per_block
    assert usage.cached_tokens + usage.transferred_tokens <= usage.prompt_tokens


async def _until_nothing_is_leased(bench: EngineBench, prompts: FreshPrompts) -> EngineLoad:
    """Steps of other requests give the engine the occasion to notice."""
    for _ in range(200):
        load: EngineLoad = bench.engine.load()
        if load.kv_blocks_leased == 0:
            break
        await bench.generate(prompts.fresh(3), prompts.sampling(max_tokens=1))
    return load


async def test_a_pulled_lease_ends(bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts) -> None:
    prompt = prompts.fresh(100)
    offered = await prefill.generate(prompt, prompts.greedy, leg=Leg.PREFILL)
    await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=_handoff(offered))
    assert (await _until_nothing_is_leased(prefill, prompts)).kv_blocks_leased == 0


async def test_a_released_lease_frees_its_blocks(prefill: EngineBench, prompts: FreshPrompts) -> None:
    offered = await prefill.generate(prompts.fresh(100), prompts.greedy, leg=Leg.PREFILL)
    assert prefill.engine.load().kv_blocks_leased == _handoff(offered).blocks == 4
    prefill.engine.release([_handoff(offered).lease_id])
    assert (await _until_nothing_is_leased(prefill, prompts)).kv_blocks_leased == 0


async def test_kv_that_was_released_is_computed_again(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts
) -> None:
    prompt = prompts.fresh(100)
    offered = await prefill.generate(prompt, prompts.greedy, leg=Leg.PREFILL)
    prefill.engine.release([_handoff(offered).lease_id])
    await _until_nothing_is_leased(prefill, prompts)
    failed_before = bench.engine.load().transfers_failed
    decoded = await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=_handoff(offered))
    full = await prefill.generate(prompt, prompts.greedy)
    assert decoded.choice().tokens == full.choice().tokens
    assert _usage(decoded).transferred_bytes == 0
    assert bench.engine.load().transfers_failed == failed_before + 1


async def test_load_counts_prefix_hits_and_transfers(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts
) -> None:
    before: EngineLoad = bench.engine.load()
    prompt = prompts.fresh(100)
    await bench.generate(prompt, prompts.greedy)
    await bench.generate(prompt, prompts.greedy)
    other = prompts.fresh(64)
    offered = await prefill.generate(other, prompts.greedy, leg=Leg.PREFILL)
    decoded = await bench.generate(other, prompts.greedy, leg=Leg.DECODE, handoff=_handoff(offered))
    after: EngineLoad = bench.engine.load()
    moved = _usage(decoded).transferred_bytes
    assert after.kv_blocks_total == bench.identity.kv_blocks
    assert after.prefix_hits_tokens - before.prefix_hits_tokens >= 96
    assert after.prefix_queries_tokens - before.prefix_queries_tokens >= 200
    assert after.transfers_received - before.transfers_received == 1
    assert after.transfer_bytes_received - before.transfer_bytes_received == moved > 0


async def test_what_is_reported_foresees_every_hit(bench: EngineBench, prompts: FreshPrompts) -> None:
    follower = await follow(bench)
    assert bench.identity.reports_kv
    context = prompts.fresh(100)
    for salt in ("", "tenant", "", "tenant"):
        prompt = [*context, *prompts.fresh(30)]
        predicted = follower.hit(prompt, salt=salt)
        done = await bench.generate(prompt, prompts.greedy, salt=salt)
        assert _usage(done).cached_tokens == predicted
        await follower.until(partial(computed, follower, prompt, done, salt))
    assert follower.exact


async def test_what_was_transferred_and_what_was_offered_is_reported(
    bench: EngineBench, prefill: EngineBench, prompts: FreshPrompts
) -> None:
    here, there = await follow(bench), await follow(prefill)
    prompt = prompts.fresh(100)
    offered = await prefill.generate(prompt, prompts.greedy, leg=Leg.PREFILL)
    await there.until(lambda: there.blocks(prompt) == 3)
    decoded = await bench.generate(prompt, prompts.greedy, leg=Leg.DECODE, handoff=_handoff(offered))
    await here.until(lambda: computed(here, prompt, decoded))
    again = await bench.generate([*prompt, 5, 6, 7], prompts.greedy)
    assert _usage(again).cached_tokens == here.hit([*prompt, 5, 6, 7]) == 96
    assert here.exact
    assert there.exact


async def test_a_snapshot_is_what_the_batches_say(bench: EngineBench, prompts: FreshPrompts) -> None:
    early = await follow(bench)
    prompt = prompts.fresh(150)
    done = await bench.generate(prompt, prompts.greedy)
    await early.until(lambda: computed(early, prompt, done))
    held = early.held()
    late = await follow(bench)
    assert late.held() == held > 0
    assert late.blocks(prompt) == early.blocks(prompt)


async def test_a_healthy_engine_does_not_report_failure(bench: EngineBench, prompts: FreshPrompts) -> None:
    failed = asyncio.ensure_future(bench.engine.wait_failed())
    await bench.generate(prompts.fresh(40), prompts.greedy)
    assert not failed.done()
    failed.cancel()


# tests/faults/test_vllm_engine_death.py has the same for vLLM, when its engine is not needed any more.
async def test_stop_ends_silently_and_twice_is_once(
    sim_engine_factory: Callable[[str], Engine], prompts: FreshPrompts
) -> None:
    bench = await start_bench(sim_engine_factory("decode"), "stopped-0")
    await stops_silently(bench, bench.request(prompts.fresh(50), prompts.sampling(max_tokens=400)))


async def test_a_leg_that_embeds_is_refused(bench: EngineBench, prompts: FreshPrompts) -> None:
    done = await bench.generate(prompts.fresh(40), prompts.sampling(), leg=Leg.EMBED)
    assert (_last(done).finish, _last(done).error) == (FinishReason.ERROR, "invalid_request")
    assert "role embed" in str(_last(done).error_message)
