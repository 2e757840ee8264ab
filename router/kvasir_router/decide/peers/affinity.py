"""The affinity key of a request, for policies that use nothing else."""

from __future__ import annotations

from kvasir.ports.routing import RequestView


def affinity_key(request: RequestView) -> str:
    """Return the client's session name, else the hash of the prompt's first block, else the request's own id,
    which no other request shares."""
    if request.session:
        return f"session:{request.session}"
    if len(request.block_hashes):
        return f"block:{request.block_hashes[0]:016x}"
    return f"request:{request.request_id}"
