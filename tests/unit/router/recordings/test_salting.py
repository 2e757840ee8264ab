"""Salted names keep what is equal, and nothing else."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvasir_router.recordings.salting import Salt, siphash

words = st.lists(st.integers(0, 2**64 - 1), max_size=50)


def test_the_function_is_siphash() -> None:
    """The vector for messages of eight bytes of the authors' reference implementation (vectors.h)."""
    key = tuple(int.from_bytes(bytes(range(at, at + 8)), "little") for at in (0, 8))
    message = np.array([int.from_bytes(bytes(range(8)), "little")], np.uint64)
    assert siphash(message, key).item() == 0x93F5F5799A932462


@given(names=words)
def test_equal_names_stay_equal_and_others_differ(names: list[int]) -> None:
    salted = Salt(b"a" * 16).blocks(array("Q", names))
    assert len(salted) == len(names)
    assert len(set(salted)) == len(set(names))
    assert all(0 <= each < 2**53 for each in salted)
    assert salted == Salt(b"a" * 16).blocks(array("Q", names))


@given(names=st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_names_of_two_salts_have_nothing_in_common(names: set[int]) -> None:
    ours, theirs = (set(Salt(secret).blocks(array("Q", sorted(names)))) for secret in (b"a" * 16, b"b" * 16))
    assert not ours & theirs


def test_labels_are_salted_by_kind() -> None:
    salt, other = Salt(b"a" * 16), Salt(b"b" * 16)
    assert salt.label("tenant", "") == ""
    assert salt.label("tenant", "acme").startswith("tenant-")
    assert "acme" not in salt.label("tenant", "acme")
    found = {salt.label("tenant", "acme"), salt.label("session", "acme"), other.label("tenant", "acme")}
    assert len({each.partition("-")[2] for each in found}) == 3
