"""Hand-offs between engines that divide layers and heads differently, rank by rank: both halves of the
connector of every rank, over the real transfers, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvasir.core.identity import HEAD_MAJOR, KvLayout
from kvasir.ports.transfer import KvRegion, KvTransfer
from kvasir.sizing.shape import stages
from kvasir_workers.connector.adapters import make_transfer
from kvasir_workers.connector.handoff.scheduler import HandoffScheduler
from kvasir_workers.connector.handoff.worker import HandoffWorker, RankPlace
from kvasir_workers.connector.layer_slices import slices_of
from kvasir_workers.connector.orders import StepOrders
from kvasir_workers.transfer.common.sliced import SlicedTransfer

LAYERS, BLOCKS, HEADS, HEAD_BYTES = 5, 16, 4, 1024
BLOCK_TOKENS, PROMPT_TOKENS = 32, 90
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Sizes:
    """Tensor-parallel ranks and pipeline stages of an engine."""

    ranks: int
    stages: int


@dataclass(slots=True)
class Request:
    """What the scheduler half reads of vLLM's."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None


@dataclass(slots=True)
class Rank:
    """One rank: its layers' KV, and the worker half of its connector."""

    kv: npt.NDArray[np.uint8]
    layers: range
    heads: slice
    worker: HandoffWorker
    endpoint: str


class Engine:
    """All ranks of an engine, and the scheduler half of its connector."""

    def __init__(self, kind: str, mine: Sizes, other: Sizes, stack: ExitStack, *, latent: bool) -> None:
        self.ranks = []
        counts = sorted({mine.stages, other.stages})
        for stage, rank in product(range(mine.stages), range(mine.ranks)):
            layers = stages(LAYERS, mine.stages)[stage]
            heads = HEADS if latent else HEADS // mine.ranks
            size = heads * HEAD_BYTES
            kv = np.zeros((len(layers), BLOCKS, size), dtype=np.uint8)

            def make() -> KvTransfer:
                return make_transfer(kind, "127.0.0.1", max(1, other.ranks // mine.ranks))

            transfer = SlicedTransfer(slices_of(layers, LAYERS, counts), make) if len(counts) > 1 else make()
            stack.enter_context(closing(transfer))
            regions = [KvRegion(int(layer.ctypes.data), size, BLOCKS) for layer in kv]
            layout = KvLayout(
                BLOCK_TOKENS, "uint8", HEAD_MAJOR, len(layers), heads, 32, len(layers) * size, mine.ranks
            )
            endpoint = transfer.register(regions, layout.of_whole_ranks() if latent else layout)
            place = RankPlace(rank, mine.ranks, stage, mine.stages, LAYERS, latent)
            worker = HandoffWorker(transfer, place=place, timeout_s=PATIENCE_S, pause=time.sleep)
            held = slice(0, size) if latent else slice(rank * size, (rank + 1) * size)
            self.ranks.append(Rank(kv, layers, held, worker, endpoint))
        self.scheduler = HandoffScheduler(BLOCK_TOKENS, 60.0, overlap=False)
        self.scheduler.set_endpoints([each.endpoint for each in self.ranks], mine.stages)

    def write(self, whole: npt.NDArray[np.uint8]) -> None:
        """Give each rank its layers and heads of `whole`."""
        for rank in self.ranks:
            rank.kv[:] = whole[rank.layers.start : rank.layers.stop, :, rank.heads]

    def holds(self, whole: npt.NDArray[np.uint8]) -> bool:
        """Whether each rank has its layers and heads of `whole`."""
        return all(
            (rank.kv == whole[rank.layers.start : rank.layers.stop, :, rank.heads]).all()
            for rank in self.ranks
        )

    def step(self, orders: StepOrders) -> None:
        """Give a step's orders to every rank."""
        for rank in self.ranks:
            rank.worker.lease(orders)
            rank.worker.pull(orders.pulls)


def ended(engine: Engine, *, sent: bool) -> Iterator[set[str]]:
    """Poll an engine's ranks; yield the requests that each has sent or received."""
    for rank in engine.ranks:
        gone, received = rank.worker.poll(idle=False)
        yield gone if sent else received


def until_all(sender: Engine, receiver: Engine) -> None:
    """Poll both engines until every rank has sent and received."""
    sent: set[int] = set()
    received: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(sent) < len(sender.ranks) or len(received) < len(receiver.ranks):
        assert time.monotonic() < deadline, f"sent by {sent}, received by {received}"
        sent |= {number for number, each in enumerate(ended(sender, sent=True)) if each}
        received |= {number for number, each in enumerate(ended(receiver, sent=False)) if each}


def handed_over(kind: str, prefill: Sizes, decode: Sizes, *, latent: bool = False) -> None:
    with ExitStack() as stack:
        sender = Engine(kind, prefill, decode, stack, latent=latent)
        receiver = Engine(kind, decode, prefill, stack, latent=latent)
        random = np.random.default_rng(7)
        whole = random.integers(0, 255, (LAYERS, BLOCKS, HEADS * HEAD_BYTES), dtype=np.uint8)
        sender.write(whole)
        offer = {"offer": {"lease_id": "lease", "fence": 3, "ttl_s": 60.0}}
        _, moved = sender.scheduler.finished(Request("p", PROMPT_TOKENS, offer), [5, 6, 9], completed=True)
        assert moved is not None
        sender.step(sender.scheduler.take_orders((), (), idle=False))
        pulling = Request("d", PROMPT_TOKENS, {"pull": moved})
        tokens = receiver.scheduler.matched_tokens(pulling, 0)
        receiver.scheduler.allocated(pulling, [1, 2, 7], tokens)
        receiver.step(receiver.scheduler.take_orders((), (), idle=True))
        until_all(sender, receiver)
        assert not any(rank.worker.take_failed() for rank in receiver.ranks)
        expected = np.zeros_like(whole)
        expected[:, [1, 2, 7]] = whole[:, [5, 6, 9]]
        assert receiver.holds(expected)
        assert not receiver.holds(whole)
        moved_bytes = 0
        for rank in receiver.ranks:
            report = rank.worker.take_report()
            assert report is not None
            moved_bytes += report.received["d"].bytes_moved
        copies = decode.ranks if latent else 1
        assert moved_bytes == 3 * LAYERS * HEADS * HEAD_BYTES * copies, "each rank reads what it needs once"


# Five layers do not divide: stages of two have 3 and 2 layers, of three 2, 2 and 1.
PAIRS = [
    (Sizes(2, 1), Sizes(1, 1)),
    (Sizes(1, 2), Sizes(1, 1)),
    (Sizes(1, 1), Sizes(1, 2)),
    (Sizes(2, 2), Sizes(1, 1)),
    (Sizes(1, 1), Sizes(2, 2)),
    (Sizes(2, 2), Sizes(2, 2)),
    (Sizes(1, 2), Sizes(2, 1)),
    (Sizes(1, 3), Sizes(1, 2)),
    (Sizes(2, 2), Sizes(1, 3)),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=str)
def test_every_rank_gets_its_layers_and_heads_from_the_ranks_that_have_them(
    prefill: Sizes, decode: Sizes
) -> None:
    pytest.importorskip("nixl")
    handed_over("nixl", prefill, decode)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(Sizes(4, 1), Sizes(1, 1)), (Sizes(1, 1), Sizes(2, 1)), (Sizes(2, 2), Sizes(1, 1))],
    ids=str,
)
def test_every_rank_gets_the_whole_latent(prefill: Sizes, decode: Sizes) -> None:
    pytest.importorskip("nixl")
    handed_over("nixl", prefill, decode, latent=True)


def test_the_other_transfer_moves_them_too() -> None:
    pytest.importorskip("torch")
    handed_over("nccl", Sizes(2, 2), Sizes(1, 1))
    handed_over("nccl", Sizes(1, 1), Sizes(2, 1), latent=True)
