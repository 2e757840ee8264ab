"""The agents that a receiving agent reads from: a bounded number, connected to when first needed, and anew
after one broke off."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.nixl.agent import NixlAgent
from kvasir_workers.transfer.nixl.endpoint import NixlEndpoint, decode

MAX_PEERS = 256


class Peers:
    """Peers of an agent; a fresh one begins with `clear`."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()
        self._endpoints: OrderedDict[str, NixlEndpoint] = OrderedDict()
        self._broken: set[str] = set()

    def endpoint(self, text: str) -> NixlEndpoint:
        """Decoded once, since every ticket of an engine carries it. Raises TransferError."""
        found = self._endpoints.pop(text, None) or decode(text)
        self._endpoints[text] = found
        if len(self._endpoints) > MAX_PEERS:
            self._endpoints.popitem(last=False)
        return found

    def connect(self, agent: NixlAgent, endpoint: NixlEndpoint, busy: Container[str]) -> None:
        """See that `agent` knows the peer. `busy` are peers that are read from. Raises TransferError."""
        peer = endpoint.agent
        if peer in self._broken:
            if peer in busy:
                raise TransferError(f"agent {peer} is broken off")
            self._forget(agent, peer)
        if peer in self._known:
            self._known.move_to_end(peer)
            return
        while len(self._known) >= MAX_PEERS:
            idle = next((name for name in self._known if name not in busy), None)
            if idle is None:
                raise TransferError(f"{MAX_PEERS} other agents are being read from")
            self._forget(agent, idle)
        agent.add_peer(endpoint.metadata, peer)
        self._known[peer] = None

    def broke_off(self, peer: str) -> None:
        """The connection to a peer is of no more use."""
        self._broken.add(peer)

    def clear(self) -> None:
        """Nobody is known."""
        self._known.clear()
        self._broken.clear()

    def _forget(self, agent: NixlAgent, peer: str) -> None:
        self._broken.discard(peer)
        if peer in self._known:
            del self._known[peer]
            agent.forget_peer(peer)
