"""The agents that a receiving agent reads from: bounded, connected on first use, and reconnected after a
failure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.lease_keys import opened_one
from kvasir_workers.transfer.nixl.agent import NixlAgent
from kvasir_workers.transfer.nixl.endpoint import NixlEndpoint, decode

MAX_PEERS = 256


class Peers:
    """Peers of an agent; `clear` resets it for a new agent."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()
        self._endpoints: OrderedDict[str, NixlEndpoint] = OrderedDict()
        self._broken: set[str] = set()

    def endpoint(self, text: str) -> tuple[NixlEndpoint, bytes]:
        """Return a decoded endpoint, cached because every ticket of an engine carries it, and the key of the
        ticket's lease. Raise TransferError."""
        packed, key = opened_one(text)
        found = self._endpoints.pop(packed, None) or decode(packed)
        self._endpoints[packed] = found
        if len(self._endpoints) > MAX_PEERS:
            self._endpoints.popitem(last=False)
        return found, key

    def connect(self, agent: NixlAgent, endpoint: NixlEndpoint, busy: Container[str]) -> None:
        """Connect `agent` to the peer unless it is connected. `busy` are peers with running reads. Raise
        TransferError."""
        peer = endpoint.agent
        if peer in self._broken:
            if peer in busy:
                raise TransferError(f"the connection to agent {peer} is broken")
            self._forget(agent, peer)
        if peer in self._known:
            self._known.move_to_end(peer)
            return
        while len(self._known) >= MAX_PEERS:
            idle = next((name for name in self._known if name not in busy), None)
            if idle is None:
                raise TransferError(f"reads from {MAX_PEERS} other agents are running")
            self._forget(agent, idle)
        agent.add_peer(endpoint.metadata, peer)
        self._known[peer] = None

    def broke_off(self, peer: str) -> None:
        """Mark a peer's connection as broken."""
        self._broken.add(peer)

    def clear(self) -> None:
        """Forget all peers."""
        self._known.clear()
        self._broken.clear()

    def _forget(self, agent: NixlAgent, peer: str) -> None:
        self._broken.discard(peer)
        if peer in self._known:
            del self._known[peer]
            agent.forget_peer(peer)
