"""A profile survives its file, and counts only for the hardware and the model that it was measured on."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvasir.core.errors import ConfigError
from kvasir.performance.profile import (
    FORMAT,
    CalibratedProfile,
    EngineProfile,
    ProfileResidual,
    decode_profile,
    encode_profile,
)

_PREFILL = EngineProfile(
    pool="prefill",
    role="PREFILL",
    device="NVIDIA H100 80GB HBM3",
    devices=2,
    parameters=8_000,
    model_bytes=16_000,
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    coefficients={"arithmetic": 0.6, "step_s": 0.003},
    residuals=(ProfileResidual("prompts", 0.04, 21),),
)
_DECODE = msgspec.structs.replace(
    _PREFILL, pool="decode", role="DECODE", coefficients={"bandwidth": 0.8}, residuals=()
)
_PROFILE = CalibratedProfile(
    FORMAT, "llama", "2026-01-02T03:04:05+00:00", {"engine": "vllm 0.32.0"}, (_PREFILL, _DECODE), 0.003, 1e-10
)


def test_a_profile_is_the_same_after_it_was_written_and_read() -> None:
    assert decode_profile(encode_profile(_PROFILE), "a.json") == _PROFILE


def test_it_counts_for_its_own_hardware_and_model_only() -> None:
    def found(device: str, devices: int, parameters: int, role: str) -> EngineProfile | None:
        return _PROFILE.engine_for(
            device=device, devices=devices, parameters=parameters, model_bytes=16_000, role=role
        )

    assert found("NVIDIA H100 80GB HBM3", 2, 8_000, "DECODE") is _DECODE
    assert found("NVIDIA H100 80GB HBM3", 2, 8_000, "BOTH") is _PREFILL
    assert found("NVIDIA A100-SXM4-80GB", 2, 8_000, "DECODE") is None
    assert found("NVIDIA H100 80GB HBM3", 4, 8_000, "DECODE") is None
    assert found("NVIDIA H100 80GB HBM3", 2, 9_000, "DECODE") is None


def test_what_it_does_not_have_is_the_data_sheet_s_and_it_says_where_it_is_from() -> None:
    found = _PROFILE.coefficients_of(_PREFILL)
    assert (found.arithmetic, found.step_s, found.bandwidth) == (0.6, 0.003, 0.7)
    assert found.source == "profile of 2026-01-02T03:04:05+00:00"


def _with(coefficients: dict[str, float]) -> dict[str, object]:
    first = json.loads(encode_profile(_PROFILE))["engines"][0]
    return {"engines": [{**first, "coefficients": coefficients}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "kvasir-profile/9"}, "kvasir-profile/9"),
        ({"engines": 3}, "kvasir calibrate"),
        (_with({"speed": 1.0}), "speed"),
        (_with({"step_s": -1.0}), "step_s"),
        (_with({"bandwidth": 0.0}), "above 0"),
    ],
)
def test_an_invalid_profile_is_refused_with_the_reason(change: dict[str, object], words: str) -> None:
    content = json.dumps(json.loads(encode_profile(_PROFILE)) | change).encode()
    with pytest.raises(ConfigError, match=words):
        decode_profile(content, "a.json")
