"""An embedding worker as it describes itself to a router."""

from __future__ import annotations

from kvasir.core.identity import NO_KV, WorkerIdentity
from kvasir.core.requests import Role


def embedding_worker(worker_id: str, epoch: int = 1) -> WorkerIdentity:
    """A worker of the pool `vectors`."""
    return WorkerIdentity(
        worker_id=worker_id,
        epoch=epoch,
        pool="vectors",
        role=Role.EMBED,
        model="m",
        revision="",
        tokenizer_digest="t",
        max_model_len=100,
        kv=NO_KV,
        kv_blocks=0,
        engine="fake",
        engine_version="0",
    )
