"""Chains as they grow in a cache: few of them, that share beginnings."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random

import pytest

from kvasir.native import chain_hashes

RandomChain = Callable[[Random], "array[int]"]


@pytest.fixture
def random_chain() -> RandomChain:
    """A chain of 40 blocks that forks in two at every seventh: 32 chains in all."""

    def draw(rng: Random) -> array[int]:
        tokens = array("I", (rng.getrandbits(1) if at % 7 == 6 else 0 for at in range(40)))
        return chain_hashes(tokens, 1, 7)

    return draw
