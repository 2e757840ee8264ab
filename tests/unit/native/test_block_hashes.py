"""Block hashes: one chain, two implementations, and a stable format."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir import native
from kvasir.native import _twin

ChainHashes = Callable[["array[int]", int, int], "array[int]"]

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200).map(lambda ids: array("I", ids))
PINNED = [0x1064744C4B8F3AB9, 0x628687E19D2B93F2]
IMPLEMENTATIONS = pytest.mark.parametrize("chain", [native.chain_hashes, _twin.chain_hashes])


def test_the_native_module_was_built() -> None:
    assert native.IS_NATIVE


@given(tokens, st.integers(1, 70), st.integers(0, 2**64 - 1))
def test_both_implementations_name_blocks_alike(ids: array[int], block_size: int, root: int) -> None:
    assert native.chain_hashes(ids, block_size, root) == _twin.chain_hashes(ids, block_size, root)


@IMPLEMENTATIONS
def test_the_format_is_pinned(chain: ChainHashes) -> None:
    assert list(chain(array("I", range(8)), 4, native.root_hash("m"))) == PINNED


@IMPLEMENTATIONS
def test_equal_names_mean_equal_prefixes(chain: ChainHashes) -> None:
    base = chain(array("I", [1, 2, 3, 4, 5, 6]), 2, 0)
    changed = chain(array("I", [1, 2, 9, 4, 5, 6]), 2, 0)
    assert base[0] == changed[0]
    assert base[1] != changed[1]
    assert base[2] != changed[2]


@IMPLEMENTATIONS
def test_a_partial_block_has_no_name(chain: ChainHashes) -> None:
    assert len(chain(array("I", range(7)), 4, 0)) == 1
    assert len(chain(array("I"), 4, 0)) == 0


@IMPLEMENTATIONS
def test_a_block_size_of_zero_is_refused(chain: ChainHashes) -> None:
    with pytest.raises(ValueError, match="block_size"):
        chain(array("I", [1]), 0, 0)


@IMPLEMENTATIONS
def test_tokens_of_another_width_are_refused(chain: ChainHashes) -> None:
    with pytest.raises(ValueError, match="4-byte"):
        chain(array("Q", [1]), 1, 0)


def test_model_salt_and_adapter_each_start_another_chain() -> None:
    roots = {
        native.root_hash("m"),
        native.root_hash("m", salt="a"),
        native.root_hash("m", adapter="a"),
        native.root_hash("ma"),
    }
    assert len(roots) == 4
