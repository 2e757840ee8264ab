"""Data read from a disk or a server is accepted only if it is exactly the expected blob."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.identity import KvLayout
from kvasir.ports.tier import KEY_BYTES, TierBlock
from kvasir_workers.tiers import blob

LAYOUT = KvLayout(16, "bfloat16", "HND", 4, 2, 64, 4096, 2)
PRINT = blob.fingerprint("model", "revision", LAYOUT)
KEY = bytes(range(KEY_BYTES))
DATA = bytes(range(256)) * 4


def made(data: bytes = DATA, key: bytes = KEY, mark: bytes = PRINT) -> bytes:
    return blob.make_header(mark, TierBlock(key, 2**64 - 1, 7), memoryview(data))


def reason(header: bytes, size: int = blob.HEADER_BYTES + len(DATA)) -> str | None:
    return blob.verify(header, size, KEY, PRINT, len(DATA))


def test_a_sound_blob_says_what_it_is() -> None:
    assert reason(made()) is None
    header = blob.read_header(made())
    assert (header.block, header.length) == (TierBlock(KEY, 2**64 - 1, 7), len(DATA))
    assert blob.verify_payload(header, DATA) is None
    assert len(made()) == blob.HEADER_BYTES


def test_each_way_to_be_something_else_has_its_word() -> None:
    assert reason(b"") == reason(made()[:-1]) == "truncated"
    assert reason(b"<html>" + made()[6:]) == "magic"
    old = bytearray(made())
    old[8] = blob.VERSION + 1
    assert reason(bytes(old)) == "version"
    assert reason(made(mark=bytes(16))) == "fingerprint"
    assert reason(made(key=bytes(KEY_BYTES))) == "key"
    assert reason(made(data=DATA[:-4])) == "length"
    assert reason(made(), len(made()) + len(DATA) - 1) == "truncated"
    assert reason(made(), len(made()) + len(DATA) + 1) == "length"
    header = blob.read_header(made())
    assert blob.verify_payload(header, DATA[:-4]) == "truncated"
    assert blob.verify_payload(header, DATA[4:] + DATA[:4]) == "checksum"


@given(st.integers(0, blob.HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_of_the_header_is_seen(bit: int) -> None:
    garbled = bytearray(made())
    garbled[bit // 8] ^= 1 << bit % 8
    assert reason(bytes(garbled)) is not None


@given(st.integers(0, len(DATA) * 8 - 1))
def test_a_flipped_bit_of_the_bytes_is_seen(bit: int) -> None:
    garbled = bytearray(DATA)
    garbled[bit // 8] ^= 1 << bit % 8
    assert blob.verify_payload(blob.read_header(made()), garbled) == "checksum"


@given(st.binary(max_size=3 * blob.HEADER_BYTES))
def test_garbage_is_never_believed_and_never_an_error(raw: bytes) -> None:
    assert reason(raw) is not None


@pytest.mark.parametrize("field", [f.name for f in fields(KvLayout)])
def test_every_field_of_the_layout_makes_another_fingerprint(field: str) -> None:
    value: Any = getattr(LAYOUT, field)
    change: dict[str, Any] = {field: value + 1 if isinstance(value, int) else value + "x"}
    other = replace(LAYOUT, **change)
    assert blob.fingerprint("model", "revision", other) != PRINT


def test_another_model_or_revision_has_another_fingerprint() -> None:
    prints = {
        blob.fingerprint(*names, LAYOUT)
        for names in (("a", "bc"), ("ab", "c"), ("abc", ""), ("a", "b"), ("b", "b"))
    }
    assert len(prints) == 5
    assert all(len(mark) == blob.FINGERPRINT_BYTES for mark in prints)


def test_buffers_of_all_kinds_have_the_same_checksum() -> None:
    view = memoryview(bytearray(b"1234" + DATA + b"5678"))[4:-4]
    assert blob.checksum(DATA) == blob.checksum(bytearray(DATA)) == blob.checksum(view)
    assert blob.checksum(view.toreadonly()) == blob.checksum(DATA)
