"""Workers and candidates to decide between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import Role

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
        )

    return make
