"""What requests of one conversation have in common, for policies that look at nothing else."""

from __future__ import annotations

from kvasir.ports.routing import RequestView


def affinity_key(request: RequestView) -> str:
    """The client's own name of the session, else the name of the prompt's first block, else the request's
    own name, which nothing else shares."""
    if request.session:
        return f"session:{request.session}"
    if len(request.block_hashes):
        return f"block:{request.block_hashes[0]:016x}"
    return f"request:{request.request_id}"
