"""The experiment measures every kind of step, and its profile predicts the engine it ran on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.kit.sim.virtual_batching import VirtualRequest, play

from kvasir.core.errors import UpstreamError
from kvasir.core.identity import Hardware, KvLayout
from kvasir.performance.coefficients import Coefficients
from kvasir.performance.engines import EngineSizes, engine_of_sizes
from kvasir.performance.step import EngineModel
from kvasir.performance.work import dense_work
from kvasir_platform.calibrate.design import design
from kvasir_platform.calibrate.samples import CalibrationSamples
from kvasir_platform.cli.calibrate.client import TimedStream
from kvasir_platform.cli.calibrate.command import MeasuredPool, measured_pools, profile_of
from kvasir_platform.cli.calibrate.experiment import Experiment

_SIZES = EngineSizes(
    hardware=Hardware("a CPU"),
    kv=KvLayout(32, "float32", "", 4, 4, 32, 32 * 4 * 2 * 4 * 32 * 4),
    parameters=5_000_000,
    model_bytes=20_000_000,
    work=dense_work(parameters=5e6, layers=4, hidden=256, kv_elements=256),
    max_model_len=4096,
)
_TRUE = Coefficients(arithmetic=0.15, attention=0.05, step_s=0.004, stream_s=2e-4, request_s=0.006)


def _engine(coefficients: Coefficients | None = None) -> EngineModel:
    made = engine_of_sizes(_SIZES)
    assert made is not None
    return made if coefficients is None else replace(made, coefficients=coefficients)


class _FakeClient:
    """Answers as an engine with the coefficients `true` would, one stream at a time."""

    def __init__(self, true: EngineModel, *, apart: bool) -> None:
        self._true = true
        self._apart = apart

    def tokenize(self, text: str) -> tuple[list[int], int]:
        return [int(word) for word in text.split()], 4096

    def timed(self, prompt: Sequence[int], max_tokens: int) -> TimedStream:
        (found,) = play([VirtualRequest(0.0, len(prompt), max_tokens)], self._true)
        server = {"ttft": found.ttft_s}
        if self._apart:
            server = {"prefill": found.ttft_s, "transfer": 0.003, "ttft": found.ttft_s + 0.02}
        # Prompts come while all streams run, which does not slow this engine.
        began = 0.1 if self._apart and max_tokens == 1 else 0.0
        times = tuple(began + server["ttft"] + at * found.itl_s for at in range(max_tokens))
        return TimedStream(began, times, max_tokens, server, 0, 1000 * self._apart)


def _samples(*, apart: bool, said: list[str] | None = None, repeats: int = 1) -> CalibrationSamples:
    experiment = Experiment(
        _FakeClient(_engine(_TRUE), apart=apart),
        # Streams of this client do not wait for each other, as those of a burst would.
        replace(design(4096, 64, 100_000, repeats=repeats), bursts=(), streams=((1, 64), (1, 1999))),
        budget=2048,
        apart=apart,
        rng=random.Random(5),
        step=(said if said is not None else []).append,
    )
    return experiment.run()


def test_an_experiment_measures_prompts_and_streams_and_says_what_it_does() -> None:
    said: list[str] = []
    found = _samples(apart=False, said=said)
    assert {each.kind for each in found.prefill} == {"prompts"}
    assert {each.kind for each in found.decode} == {"decoding"}
    assert not found.transfers
    assert len(said) > 12


def test_engines_apart_also_show_transfers_and_hand_offs() -> None:
    found = _samples(apart=True)
    assert {each.kind for each in found.decode} == {"decoding", "hand-offs"}
    assert len(found.transfers) == len(design(4096, 64, 100_000).prompts)


def test_prompts_beside_streams_have_as_many_rounds_as_all_else() -> None:
    said: list[str] = []
    found = _samples(apart=True, said=said, repeats=3)
    assert len(found.prefill_slowed) == len(found.decode_slowed) == 3
    assert said[-3:] == [f"prompts beside streams, {number} of 3" for number in (1, 2, 3)]


def test_the_profile_predicts_the_prompts_of_the_engine_it_was_measured_on() -> None:
    pool = MeasuredPool("serve", "BOTH", "sim 1", _SIZES, _engine())
    found = profile_of("m", pool, pool, _samples(apart=False), measured="2026-01-01", versions={})
    (engine,) = found.engines
    fitted, true = _engine(found.coefficients_of(engine)), _engine(_TRUE)
    for tokens in (100, 1000, 3000):
        assert fitted.prefill_s(tokens) == pytest.approx(true.prefill_s(tokens), rel=0.1)
    assert fitted.coefficients.source == "profile of 2026-01-01"


def test_engines_apart_have_a_profile_each_and_the_transfer_between_them() -> None:
    prefill = MeasuredPool("prefill", "PREFILL", "sim 1", _SIZES, _engine())
    decode = MeasuredPool("decode", "DECODE", "sim 1", _SIZES, _engine())
    found = profile_of("m", prefill, decode, _samples(apart=True), measured="2026-01-01", versions={})
    assert [each.pool for each in found.engines] == ["prefill", "decode"]
    assert found.transfer_fixed_s + 1000 * found.transfer_byte_s == pytest.approx(0.003, rel=0.05)


def test_a_request_that_comes_while_both_of_two_engines_compute_is_as_late_at_either() -> None:
    found = _samples(apart=True)
    lengths = {each.chunk.context + 1 for each in found.decode_busy}
    assert lengths == {64, 512}
    prefill = MeasuredPool("prefill", "PREFILL", "sim 1", _SIZES, _engine())
    decode = MeasuredPool("decode", "DECODE", "sim 1", _SIZES, _engine())
    found.decode_busy = [replace(each, seconds=each.seconds + 0.5) for each in found.decode_busy]
    first, last = profile_of("m", prefill, decode, found, measured="", versions={}).engines
    delay = last.coefficients["busy_request_s"] - last.coefficients["request_s"]
    assert delay == pytest.approx(0.5, abs=0.02)
    assert first.coefficients["busy_request_s"] - first.coefficients["request_s"] == pytest.approx(delay)


def _worker(role: str, **changes: Any) -> Mapping[str, Any]:
    shown = {
        "pool": role.lower(), "role": role, "model": "m", "state": "ready", "engine": "vllm 0.32",
        "hardware": asdict(_SIZES.hardware), "kv_layout": asdict(_SIZES.kv), "model_parameters": 5_000_000,
        "model_bytes": 20_000_000, "model_work": None, "max_model_len": 4096,
        "batch": {"max_num_batched_tokens": 512, "max_num_seqs": 8},
    }  # fmt: skip
    return shown | changes


def test_pools_are_found_by_what_their_workers_do() -> None:
    prefill, decode = measured_pools([_worker("PREFILL"), _worker("DECODE")], "m")
    assert (prefill.pool, decode.pool) == ("prefill", "decode")
    assert prefill.engine.shape.max_num_batched_tokens == 512
    both, same = measured_pools([_worker("BOTH")], "m")
    assert both is same


def test_workers_that_report_no_sizes_cannot_be_calibrated() -> None:
    for workers in ([], [_worker("BOTH", model_parameters=0)], [_worker("BOTH", model="other")]):
        with pytest.raises(UpstreamError, match="reports the sizes"):
            measured_pools(workers, "m")


def test_a_design_keeps_within_the_context_and_the_cache() -> None:
    small = design(1024, 16, 4096)
    assert max(small.prompts) + small.output_tokens < 1024
    assert all(number * (context + small.output_tokens) <= 0.8 * 4096 for number, context in small.streams)
    assert max(number for number, _ in small.streams) <= 16
    assert design(4096, 64, 100_000, quick=True).runs < design(4096, 64, 100_000).runs / 1.6
