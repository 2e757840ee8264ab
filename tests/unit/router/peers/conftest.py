"""Fleets in columns, prompts as chains of names, and draws that a test decides."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np
import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import LOWER_TIERS, Candidates, RateColumns, RequestView, RoutingTarget

BLOCK = 16


class ScriptedRng:
    """Draws what it was given, in order."""

    def __init__(self, draws: Iterable[int]) -> None:
        self._draws = list(draws)

    def random(self) -> float:
        raise AssertionError("no policy here draws a real number from a script")

    def randrange(self, stop: int, /) -> int:
        drawn = self._draws.pop(0)
        assert 0 <= drawn < stop
        return drawn

    def getrandbits(self, k: int, /) -> int:
        raise AssertionError("no policy here draws bits")


def _column(values: Sequence[float] | None, count: int, default: float, kind: type) -> np.ndarray:
    return np.array([default] * count if values is None else values, dtype=kind)


@pytest.fixture
def fleet() -> Callable[..., Candidates]:
    """`count` places w0, w1, ... of one rank each; columns by name, zero where none is given."""

    def make(count: int, roles: str = "", **columns: Sequence[float]) -> Candidates:
        rates = {
            name: _column(columns.get(name), count, 0.0, float)
            for name in RateColumns._fields
            if not name.startswith("tier_")
        }
        tiers = columns.get("tier_tokens")
        roles = roles or "b" * count

        def whole(name: str, default: int = 0) -> np.ndarray:
            return _column(columns.get(name), count, default, np.int64)

        return Candidates(
            targets=tuple(RoutingTarget(f"w{index}") for index in range(count)),
            worker=np.arange(count),
            prefills=np.array([role in "pb" for role in roles], dtype=bool),
            decodes=np.array([role in "db" for role in roles], dtype=bool),
            cached_tokens=whole("cached_tokens"),
            tier_tokens=np.zeros((count, LOWER_TIERS), np.int64)
            if tiers is None
            else np.array(tiers, np.int64),
            queued_prefill_tokens=whole("queued_prefill_tokens"),
            waiting=whole("waiting"),
            streams=whole("streams"),
            reserved_kv_tokens=whole("reserved_kv_tokens"),
            held_tokens=whole("held_tokens"),
            kv_tokens=whole("kv_tokens", 10_000),
            kv_token_bytes=_column(columns.get("kv_token_bytes"), count, 1.0, float),
            block_size=whole("block_size", BLOCK),
            rates=RateColumns(
                **rates,
                tier_fixed_s=np.zeros((count, LOWER_TIERS)),
                tier_byte_s=np.zeros((count, LOWER_TIERS)),
            ),
        )

    return make


@pytest.fixture
def chain() -> Callable[[Sequence[object]], array[int]]:
    """The names of the blocks that a sequence spells, one for each item and all before it."""

    def make(items: Sequence[object]) -> array[int]:
        return array(
            "Q",
            (
                int.from_bytes(
                    blake2b(repr(tuple(items[: i + 1])).encode(), digest_size=8).digest(), "little"
                )
                for i in range(len(items))
            ),
        )

    return make


@pytest.fixture
def prompt(chain: Callable[[Sequence[object]], array[int]]) -> Callable[..., RequestView]:
    """A request whose prompt has a block for each item."""

    def make(items: Sequence[object] = (), tokens: int | None = None, **fields: object) -> RequestView:
        known = {"request_id": "r", "output_tokens": 10, **fields}
        count = len(items) * BLOCK if tokens is None else tokens
        return RequestView(prompt_tokens=count, block_hashes=chain(items), **known)  # type: ignore[arg-type]

    return make


@pytest.fixture
def draws() -> Callable[..., Rng]:
    """Randomness as the test says, or seeded where it says nothing."""

    def make(*values: int) -> Rng:
        return ScriptedRng(values) if values else random.Random(0)

    return make
