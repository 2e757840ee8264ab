"""What a cell accepts of another cell's report."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ProtocolError
from kvasir_router.regions.reports import (
    MAX_MODELS,
    MAX_PREFIXES,
    MAX_REPORT_BYTES,
    CachedPrefix,
    CellReport,
    ModelReport,
    cached_tokens,
    decode_report,
    encode_report,
)


def test_a_report_arrives_as_it_was_sent() -> None:
    prefixes = (CachedPrefix(7, 512), CachedPrefix((1 << 64) - 1, 64))
    model = ModelReport("tiny", "main@abc", 4, 0.25, 12_000.0, 900_000, 0.8, prefixes)
    report = CellReport("eu-west", 1_700_000_000_000, 17, (model,), draining=True)
    assert decode_report(encode_report(report)) == report


@given(st.binary(max_size=200))
def test_bytes_that_are_no_report_raise_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode_report(data), CellReport)


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", [3, 4, 6])
def test_numbers_that_no_decision_can_use_are_refused(field: int, number: float) -> None:
    model: list[object] = ["tiny", "", 1, 0.0, 1.0, 1, 0.0]
    model[field] = number
    with pytest.raises(ProtocolError):
        decode_report(msgspec.msgpack.encode(["a", 1, 1, [model]]))


def test_more_models_prefixes_or_bytes_than_the_bounds_are_refused() -> None:
    with pytest.raises(ProtocolError):
        encode_report(CellReport("a", 1, 1, tuple(ModelReport(f"m{i}") for i in range(MAX_MODELS + 1))))
    many = tuple(CachedPrefix(i, 1) for i in range(MAX_PREFIXES + 1))
    with pytest.raises(ProtocolError):
        encode_report(CellReport("a", 1, 1, (ModelReport("m", prefixes=many),)))
    with pytest.raises(ProtocolError, match="exceeds"):
        decode_report(b"\x00" * (MAX_REPORT_BYTES + 1))


def test_the_largest_report_is_within_the_bytes_that_are_read() -> None:
    prefixes = tuple(CachedPrefix((1 << 64) - 1, 1 << 20) for _ in range(MAX_PREFIXES))
    models = tuple(
        ModelReport(f"model-{i}", "main", 9, 1.5, 9.5, 9, 1.5, prefixes) for i in range(MAX_MODELS)
    )
    assert decode_report(encode_report(CellReport("a", 1, 1, models))).models == models


def test_a_report_of_an_older_or_newer_version_is_read() -> None:
    older = msgspec.msgpack.encode(["a", 1, 2, [["tiny", "main", 3]]])
    assert decode_report(older).models[0] == ModelReport("tiny", "main", 3)
    newer = msgspec.msgpack.encode(["a", 1, 2, [], False, "a field of later"])
    assert decode_report(newer) == CellReport("a", 1, 2)


def test_the_longest_reported_prefix_of_a_prompt_counts() -> None:
    report = ModelReport("m", prefixes=(CachedPrefix(1, 64), CachedPrefix(2, 128), CachedPrefix(9, 512)))
    assert cached_tokens(report, frozenset((1, 2, 3))) == 128
    assert cached_tokens(report, frozenset((4,))) == 0
