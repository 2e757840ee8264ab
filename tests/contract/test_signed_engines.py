"""KV moves between engines whose connections among their own nodes are signed, each with a key of its own."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from tests.kit.engines.transfer_peers import ProcessPeer

from kvasir.ports.transfer import PullSucceeded, TransferEvent
from kvasir_workers.engines.signing.signed_tcp import cannot_sign, make_key, signing_variables

# Each process loads torch, and the library before it.
pytestmark = [pytest.mark.slow, pytest.mark.soak]

BLOCK_BYTES = 4096
PATIENCE_S = 30.0


def first_event(peer: ProcessPeer) -> TransferEvent:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := peer.poll():
            event: TransferEvent = found[0]
            return event
    pytest.fail("nothing happened")


@pytest.mark.parametrize("key", [make_key(), ""], ids=["another key", "one node"])
def test_engines_with_keys_of_their_own_exchange_kv(key: str) -> None:
    pytest.importorskip("torch")
    assert cannot_sign() is None
    with ExitStack() as ends:
        source = ProcessPeer("source", "nccl", **signing_variables(make_key(), {}))
        ends.callback(source.end)
        target = ProcessPeer("target", "nccl", **signing_variables(key, {}))
        ends.callback(target.end)
        source.start(BLOCK_BYTES)
        target.start(BLOCK_BYTES)
        source.write(1, 5)
        target.pull("p", source.offer("l", 1, [1], 60.0), 0, [2], 60.0)
        assert isinstance(first_event(target), PullSucceeded)
        assert target.read(2) == source.read(1)
