"""Workers and candidates to decide between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import pytest

from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import Role
from kvasir.ports.routing import LOWER_TIERS, Candidates, RateColumns, RoutingTarget

MakeIdentity = Callable[..., WorkerIdentity]


@pytest.fixture
def make_identity() -> MakeIdentity:
    def make(
        worker_id: str,
        role: Role = Role.BOTH,
        *,
        epoch: int = 1,
        model: str = "m",
        tokenizer_digest: str = "t",
        block_size: int = 4,
        dtype: str = "f32",
        adapters: tuple[str, ...] = (),
        ranks: int = 1,
        images: bool = False,
    ) -> WorkerIdentity:
        return WorkerIdentity(
            worker_id=worker_id,
            epoch=epoch,
            pool=role.value,
            role=role,
            model=model,
            revision="",
            tokenizer_digest=tokenizer_digest,
            max_model_len=1000,
            kv=KvLayout(block_size, dtype, "nhd", 1, 1, 1, 64),
            kv_blocks=100,
            engine="fake",
            engine_version="0",
            transfer="fake",
            adapters=adapters,
            data_parallel_size=ranks,
            images=images,
        )

    return make


class MakeCandidates(Protocol):
    """Candidates from places, each a worker_id, a role, a rank, columns and rates by name; what is not named
    is zero, but for the rates."""

    def __call__(self, *places: Mapping[str, Any]) -> Candidates: ...


@pytest.fixture(scope="session")
def make_candidates() -> MakeCandidates:
    rates = {
        "prefill_fixed_s": 0.0,
        "prefill_token_s": 0.001,
        "step_fixed_s": 0.01,
        "step_stream_s": 0.001,
        "transfer_fixed_s": 0.0,
        "transfer_byte_s": 1e-6,
        "tier_fixed_s": (0.0, 0.0, 0.0),
        "tier_byte_s": (1e-9, 1e-8, 1e-7),
    }
    known = {"kv_tokens": 100_000, "kv_token_bytes": 100.0, "block_size": 16, "tier_tokens": (0, 0, 0)}

    def make(*places: Mapping[str, Any]) -> Candidates:
        rows = [dict[str, Any](rates | known) | dict(place) for place in places]

        def ints(name: str) -> Any:
            return np.array([row.get(name, 0) for row in rows], dtype=np.int64)

        def floats(name: str) -> Any:
            return np.array([row[name] for row in rows], dtype=np.float64)

        names = sorted({row["worker_id"] for row in rows})
        roles = [row.get("role", Role.BOTH) for row in rows]
        return Candidates(
            targets=tuple(RoutingTarget(row["worker_id"], row.get("rank", 0)) for row in rows),
            worker=np.array([names.index(row["worker_id"]) for row in rows], dtype=np.int64),
            prefills=np.array([role is not Role.DECODE for role in roles], dtype=np.bool_),
            decodes=np.array([role is not Role.PREFILL for role in roles], dtype=np.bool_),
            cached_tokens=ints("cached_tokens"),
            tier_tokens=ints("tier_tokens").reshape(len(rows), LOWER_TIERS),
            queued_prefill_tokens=ints("queued_prefill_tokens"),
            waiting=ints("waiting"),
            streams=ints("streams"),
            reserved_kv_tokens=ints("reserved_kv_tokens"),
            held_tokens=ints("held_tokens"),
            kv_tokens=ints("kv_tokens"),
            kv_token_bytes=floats("kv_token_bytes"),
            block_size=ints("block_size"),
            rates=RateColumns(
                **{name: floats(name) for name in RateColumns._fields if not name.startswith("tier_")},
                tier_fixed_s=floats("tier_fixed_s").reshape(len(rows), LOWER_TIERS),
                tier_byte_s=floats("tier_byte_s").reshape(len(rows), LOWER_TIERS),
            ),
        )

    return make
