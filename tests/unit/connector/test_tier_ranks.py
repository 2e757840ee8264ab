"""Each rank of an engine keeps its own part of a block: ranks of stages, of tensor parallelism, on one node
or several, with tensors as the device and real copies."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.connector.request_blocks import RequestProgress
from kvasir_workers.connector.settings import Settings
from kvasir_workers.connector.tiers.orders import TierOrders, TierReport
from kvasir_workers.connector.tiers.setup import make_tier_scheduler, make_tier_worker, part_offsets

torch = pytest.importorskip("torch")

SIZE, BLOCKS = 4, 16
LAYER = (2, 3)
LAYER_BYTES = 4 * LAYER[0] * LAYER[1]
PROMPT = list(range(17))
TIERS = {"cpu": {"bytes": 1 << 20}}


def layout(layers: int, ranks: int) -> KvLayout:
    return KvLayout(SIZE, "float32", "x", layers, 1, 3, layers * LAYER_BYTES, ranks)


class Engine:
    """Stages with these numbers of layers, each divided among `ranks`, and its requests as vLLM has them."""

    def __init__(self, folder: Path, stages: tuple[int, ...], ranks: int, nodes: int) -> None:
        self._numbers = itertools.count()
        layouts = [layout(layers, ranks) for layers in stages for _ in range(ranks)]
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=SimpleNamespace(model=str(folder), dtype="float32"),
            parallel_config=SimpleNamespace(nnodes_within_dp=nodes),
        )
        self.side = make_tier_scheduler(
            Settings(tiers=TIERS, model="m"),
            config,
            layouts,
            window=None,
            on_device=lambda _: False,
        )
        self.caches = [
            {f"layers.{at}": torch.zeros((BLOCKS, *LAYER)) for at in range(each.layers)} for each in layouts
        ]
        self.workers = [
            make_tier_worker(
                cache,
                [KvRegion(layer.data_ptr(), LAYER_BYTES, BLOCKS) for layer in cache.values()],
                rank,
            )
            for rank, cache in enumerate(self.caches)
        ]
        self.slow: set[int] = set()

    def step(self, *progress: RequestProgress) -> None:
        """A step in which the `slow` ranks report nothing."""
        orders = self.side.take_orders(progress, (), idle=not progress) or TierOrders()
        report, ended = TierReport(), []
        for rank, worker in enumerate(self.workers):
            worker.before_forward(orders)
            worker.load(orders)
            worker.after_forward(orders)
            if rank not in self.slow:
                ended.append(worker.poll(idle=False))
                report.merge(worker.take_report())
        self.side.update(report, set.intersection(*ended))

    def request(self) -> Any:
        keys = [hashlib.sha256(bytes(PROMPT[: end + SIZE])).digest() for end in range(0, 16, SIZE)]
        return SimpleNamespace(
            request_id=f"r{next(self._numbers)}",
            all_token_ids=PROMPT,
            num_tokens=len(PROMPT),
            num_prompt_tokens=len(PROMPT),
            num_preemptions=0,
            block_hashes=keys,
            cache_salt=None,
            lora_request=None,
            mm_features=(),
            kv_transfer_params=None,
            skip_reading_prefix_cache=False,
        )

    def compute(self, blocks: list[int]) -> None:
        """Compute the prompt into these blocks."""
        request = self.request()
        self.side.arrived(request)
        self.side.allocated(request, blocks, 0)
        for rank, cache in enumerate(self.caches):
            for number, layer in enumerate(cache.values()):
                for at, block in enumerate(blocks):
                    layer[block] = 1000 * rank + 100 * number + at
        self.step(RequestProgress(request.request_id, 0, len(PROMPT), lambda _: (blocks,)))
        self.side.finished(request)

    def found(self, blocks: list[int]) -> int | None:
        """How many tokens come back from the tiers, into these blocks."""
        request = self.request()
        self.side.arrived(request)
        found = self.side.matched_tokens(request, 0)
        if found:
            self.side.allocated(request, blocks, found)
            self.step()
        self.side.finished(request)
        return found


Make = Any
SHAPES = pytest.mark.parametrize(
    ("stages", "ranks", "nodes"),
    [((3,), 2, 1), ((3,), 2, 2), ((2, 1), 1, 1), ((2, 1), 2, 1), ((2, 1), 2, 2), ((1, 1, 2), 2, 3)],
)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    (tmp_path / "config.json").write_text("{}")
    made: list[Engine] = []

    def build(stages: tuple[int, ...], ranks: int, nodes: int) -> Engine:
        made.append(Engine(tmp_path, stages, ranks, nodes))
        return made[-1]

    yield build
    for engine in made:
        engine.side.close()


@SHAPES
def test_every_layer_of_every_rank_comes_back_into_other_blocks(
    make: Make, stages: tuple[int, ...], ranks: int, nodes: int
) -> None:
    engine = make(stages, ranks, nodes)
    engine.compute([1, 2, 3, 4, 5])
    computed = [{name: layer.clone() for name, layer in cache.items()} for cache in engine.caches]
    for cache in engine.caches:
        for layer in cache.values():
            layer[:] = -1.0
    assert engine.found([9, 8, 7, 6, 10]) == 16
    for cache, before in zip(engine.caches, computed, strict=True):
        for name, layer in cache.items():
            assert torch.equal(layer[[9, 8, 7, 6]], before[name][[1, 2, 3, 4]])
            assert bool((layer[[0, 1, 2, 3, 4, 5, 10]] == -1.0).all())


@SHAPES
def test_a_prefix_is_promised_once_the_last_rank_has_stored_it(
    make: Make, stages: tuple[int, ...], ranks: int, nodes: int
) -> None:
    engine = make(stages, ranks, nodes)
    engine.slow = {len(engine.workers) - 1}
    engine.compute([1, 2, 3, 4, 5])
    assert engine.found([6, 7, 8, 9, 10]) is None, "the request waits for the last rank"
    engine.slow = set()
    engine.step()
    assert engine.found([6, 7, 8, 9, 10]) == 16


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_engine_that_starts_again_promises_nothing_of_the_memory_of_the_one_before(
    make: Make, nodes: int
) -> None:
    make((2, 1), 2, nodes).compute([1, 2, 3, 4, 5])
    assert make((2, 1), 2, nodes).found([6, 7, 8, 9, 10]) == 0


def test_a_slot_has_the_same_bytes_wherever_stages_end() -> None:
    def places(*stages: int) -> list[int]:
        """The first byte of each layer of each tensor-parallel rank."""
        layouts = [layout(layers, 2) for layers in stages for _ in range(2)]
        offsets = part_offsets(layouts)
        return [
            offsets[stage * 2 + rank] + at * LAYER_BYTES
            for rank in range(2)
            for stage, layers in enumerate(stages)
            for at in range(layers)
        ]

    assert places(6) == places(1, 5) == places(2, 3, 1) == [at * LAYER_BYTES for at in range(12)]
