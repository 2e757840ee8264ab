"""Continuous batching in virtual time: queues grow, batches form, and KV moves between engines apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.kit.sim.virtual_batching import EnginesApart, VirtualRequest, play

from kvasir.performance.coefficients import Coefficients
from kvasir.performance.device import reference_device
from kvasir.performance.step import EngineModel, PromptChunk, StepWork
from kvasir.performance.work import dense_work
from kvasir.sizing.shape import EngineShape

_ENGINE = EngineModel(
    dense_work(parameters=5e6, layers=4, hidden=256, kv_elements=256),
    reference_device("cpu"),
    EngineShape(max_num_batched_tokens=512, max_num_seqs=8),
    coefficients=Coefficients(arithmetic=0.1, step_s=0.004, stream_s=1e-4, request_s=0.002, shared=0.5),
)


def test_a_request_alone_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    (found,) = play([VirtualRequest(1.0, 1200, 3)], _ENGINE)
    assert found.at_s == 1.0
    assert found.ttft_s == pytest.approx(_ENGINE.prefill_s(1200))
    steps = [_ENGINE.decode(1, 1200 + at).seconds for at in range(2)]
    assert found.itl_s == pytest.approx(sum(steps) / 2)


def test_cached_tokens_are_not_computed() -> None:
    (whole,), (cached,) = (play([VirtualRequest(0.0, 500, 1, n)], _ENGINE) for n in (0, 450))
    assert cached.ttft_s < whole.ttft_s


def test_streams_share_steps_up_to_the_largest_batch() -> None:
    eight = play([VirtualRequest(0.0, 32, 50)] * 8, _ENGINE)
    nine = play([VirtualRequest(0.0, 32, 50)] * 9, _ENGINE)
    assert max(each.ttft_s for each in eight) < 0.1
    assert nine[-1].first_s > min(each.last_s for each in nine[:8])


def test_a_prompt_makes_the_step_of_the_streams_beside_it_longer() -> None:
    alone = play([VirtualRequest(0.0, 32, 50)], _ENGINE)[0]
    beside = play([VirtualRequest(0.0, 32, 50), VirtualRequest(0.1, 500, 1)], _ENGINE)[0]
    prompt = _ENGINE.step(StepWork((PromptChunk(500),), 1, 50)).seconds - _ENGINE.decode(1, 50).seconds
    assert beside.last_s - alone.last_s == pytest.approx(prompt, rel=0.05)


def test_above_its_capacity_an_engine_makes_requests_wait_for_longer_and_longer() -> None:
    found = play([VirtualRequest(0.02 * n, 512, 1) for n in range(100)], _ENGINE)
    assert found[99].ttft_s > 1.9 * found[49].ttft_s > 1.9 * found[9].ttft_s


def test_in_a_closed_loop_a_request_begins_when_one_has_ended() -> None:
    found = play([VirtualRequest(0.0, 64, 10)] * 6, _ENGINE, users=2)
    ends = sorted(each.last_s for each in found)
    assert [each.at_s for each in found[:2]] == [0.0, 0.0]
    assert [each.at_s for each in found[2:]] == ends[:4]


def test_engines_apart_move_kv_and_do_not_stall_streams() -> None:
    apart = EnginesApart(_ENGINE, _ENGINE, fixed_s=0.003, byte_s=1e-9)
    (found,) = play([VirtualRequest(0.0, 400, 5)], apart)
    moved = 0.003 + _ENGINE.context_bytes(400) * 1e-9
    last = _ENGINE.step(StepWork((PromptChunk(1, 399),))).seconds
    assert found.ttft_s == pytest.approx(_ENGINE.prefill_s(400) + moved + 0.002 + last)
    load = [VirtualRequest(0.0, 32, 50), *(VirtualRequest(0.05 * n, 500, 1) for n in range(1, 6))]
    assert play(load, apart)[0].itl_s < play(load, _ENGINE)[0].itl_s


def test_engines_on_one_device_slow_each_other() -> None:
    load = [VirtualRequest(0.0, 32, 50), *(VirtualRequest(0.05 * n, 500, 1) for n in range(1, 6))]
    apart = EnginesApart(_ENGINE, _ENGINE, 0.003, 1e-9)
    together = replace(apart, together=True)
    assert play(load, together)[0].itl_s > play(load, apart)[0].itl_s


def test_what_precedes_a_step_takes_longer_beside_another_step() -> None:
    slow = replace(_ENGINE, coefficients=replace(_ENGINE.coefficients, busy_request_s=0.05))
    load = [VirtualRequest(0.0, 32, 50), VirtualRequest(0.1, 32, 2)]
    alone, beside = play(load, slow)
    assert alone.ttft_s == pytest.approx(_ENGINE.prefill_s(32))
    assert beside.ttft_s > play(load, _ENGINE)[1].ttft_s + 0.03


def test_a_request_that_comes_at_the_end_of_a_step_is_beside_the_streams_that_go_on() -> None:
    slow = replace(_ENGINE, coefficients=replace(_ENGINE.coefficients, busy_request_s=0.05))
    load = [VirtualRequest(0.0, 32, 50), VirtualRequest(0.0, 32, 5), VirtualRequest(0.0, 32, 2)]
    third = play(load, slow, users=2)[2]
    assert third.at_s > 0.0
    assert third.ttft_s > play(load, _ENGINE, users=2)[2].ttft_s + 0.04
