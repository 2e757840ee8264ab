"""Slices of layers that do not all go the same way; tests/contract/test_transfer.py has those that do."""

from __future__ import annotations

import pytest
from tests.kit.engines.memory_transfer import MemoryFabric, MemoryTransfer
from tests.kit.engines.transfer_peers import LocalPeer, sliced

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import LeaseEnded, Offer, PullFailed
from kvasir_workers.connector.layer_slices import sending_stages, slice_starts, slices_of
from kvasir_workers.transfer.common.sliced import LayerSlice, SlicedEndpoint
from kvasir_workers.transfer.common.ticket import pack_struct

BLOCK_BYTES = 4096


class Peers:
    """A sender and a receiver in two slices each, and the agents of the sender."""

    def __init__(self) -> None:
        self.agents: list[MemoryTransfer] = []
        fabric = MemoryFabric()

        def peer(name: str) -> LocalPeer:
            def make(suffix: str, now: object) -> MemoryTransfer:
                self.agents.append(MemoryTransfer(name + suffix, fabric, now))  # type: ignore[arg-type]
                return self.agents[-1]

            return LocalPeer(lambda now: sliced(lambda suffix: make(suffix, now)))

        self.source, self.target = peer("source"), peer("target")
        self.endpoint = self.source.start(BLOCK_BYTES)
        self.target.start(BLOCK_BYTES)


def test_an_offer_that_one_slice_cannot_make_leaves_no_lease_in_another() -> None:
    peers = Peers()
    # The second slice's agent has the lease already.
    peers.agents[1].offer("lease", 1, [3], 60.0)
    with pytest.raises(TransferError, match="live already"):
        peers.source.offer("lease", 1, [3], 60.0)
    assert peers.agents[0].poll() == [LeaseEnded("lease", "released")]


def test_a_pull_whose_second_slice_fails_is_failed_when_both_have_ended() -> None:
    peers = Peers()
    offer = peers.source.offer("lease", 1, [3], 60.0)
    peers.agents[1].release("lease")
    peers.target.pull("pull", offer, 0, [5], 60.0)
    (ended,) = peers.target.poll()
    assert isinstance(ended, PullFailed)
    assert (ended.pull_id, ended.reason) == ("pull", "expired")
    assert peers.source.poll() == [LeaseEnded("lease", "released")], "the worst end counts"


def test_a_sender_without_slices_of_the_receiver_is_a_failed_pull() -> None:
    peers = Peers()
    for endpoint in ("garbled", pack_struct(SlicedEndpoint({9: "agent"}))):
        peers.target.pull("pull", Offer("lease", 1, 60.0, (3,), 1, endpoint), 0, [5], 60.0)
        (ended,) = peers.target.poll()
        assert isinstance(ended, PullFailed)
        assert ended.reason == "layout"


def test_slices_end_where_a_stage_of_either_engine_ends() -> None:
    # Two stages have 3 and 2 of 5 layers, three have 2, 2 and 1.
    assert slice_starts(5, [2, 3]) == [0, 2, 3, 4]
    assert slices_of([0, 1, 2], 5, [2, 3]) == [LayerSlice(0, range(2)), LayerSlice(1, range(2, 3))]
    assert slices_of([2, 3], 5, [2, 3]) == [LayerSlice(1, range(1)), LayerSlice(2, range(1, 2))]
    assert slices_of(range(5), 5, [1]) == [LayerSlice(0, range(5))]


def test_a_stage_reads_from_those_that_have_its_layers() -> None:
    assert [sending_stages(5, stage, 2, 3) for stage in range(2)] == [[0, 1], [1, 2]]
    assert [sending_stages(5, stage, 3, 2) for stage in range(3)] == [[0], [0, 1], [1]]
    assert sending_stages(0, 1, 2, 2) == [1], "of as many stages, the same one"
