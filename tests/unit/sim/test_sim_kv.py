"""Simulated engines report exactly what is in their caches, on every data-parallel rank."""

from __future__ import annotations

import random
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.engines.recorder import Recorded

from kvasir.config.spec.deployment import Deployment, EngineSpec, LoraSpec, ModelSpec, PoolSpec, SimSpec
from kvasir.core.kv import KvBatch
from kvasir.core.requests import EngineRequest, Leg, Role, StepBatch, Usage, token_ids
from kvasir.native import PrefixTree, chain_hashes, root_hash
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.engines.sim.fabric import SimFabric

BLOCK = 16
# 64 blocks a rank.
ENGINE = EngineSpec(
    kind="sim",
    block_size=BLOCK,
    kv_cache_bytes=64 * 32_768,
    max_num_batched_tokens=128,
    sim=SimSpec(prefill_tokens_per_s=1e5, decode_step_s=1e-3),
)


def deployment(**changes: Any) -> Deployment:
    engine = ENGINE.model_copy(update=changes)
    return Deployment(
        model=ModelSpec(max_model_len=512),
        lora=(LoraSpec(name="sum", path="/sum"),),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        ),
    )


@dataclass
class Watched:
    """An engine, and a router's view of what it says."""

    bench: EngineBench
    engine: SimEngine
    prompts: FreshPrompts
    batches: list[KvBatch]
    tree: PrefixTree
    groups: list[int]

    def depth(self, tokens: Sequence[int], rank: int = 0, salt: str = "", adapter: str | None = None) -> int:
        """Tokens of a prompt that the reports foresee to be found on a rank."""
        model = self.bench.identity.model
        depths = array("I", bytes(16 * len(self.groups)))
        self.tree.match(chain_hashes(token_ids(tokens), BLOCK, root_hash(model, salt, adapter or "")), depths)
        found = depths[4 * self.groups[rank]]
        # The last token is always computed.
        return min(found, (len(tokens) - 1) // BLOCK) * BLOCK

    async def ask(
        self, tokens: Sequence[int], rank: int | None = None, salt: str = "", adapter: str | None = None
    ) -> Recorded:
        request = self.bench.request(tokens, self.prompts.greedy, salt=salt)
        (done,) = await self.bench.run(replace(request, adapter=adapter, data_parallel_rank=rank))
        return done


def usage(done: Recorded) -> Usage:
    assert done.last is not None
    assert done.last.usage is not None
    return done.last.usage


def watch(scenario: Callable[[Watched], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        spec = deployment(**changes)
        engine = SimEngine(spec, spec.pool("decode"), clock=VirtualClock(), fabric=SimFabric())
        bench = await start_bench(engine, "decode-0", epoch=3)
        ranks = bench.identity.data_parallel_size
        tree = PrefixTree(1 << 20, 0)
        groups = [tree.add_group() for _ in range(ranks)]
        batches: list[KvBatch] = []

        def subscribe(batch: KvBatch) -> None:
            batches.append(batch)
            tree.apply(groups, batch.log)

        assert engine.kv is not None
        engine.kv.subscribe(subscribe)
        await scenario(Watched(bench, engine, FreshPrompts(random.Random(2)), batches, tree, groups))
        engine.check_integrity()
        assert [(b.epoch, b.sequence) for b in batches] == [(3, n) for n in range(1, len(batches) + 1)]
        await engine.stop()

    run_virtual(main())


def test_prompts_and_what_was_generated_are_reported_as_they_are_computed() -> None:
    async def scenario(worker: Watched) -> None:
        prompt = worker.prompts.fresh(40)
        done = await worker.ask(prompt)
        context = prompt + done.choice().tokens
        # The last token that was generated has no KV.
        assert worker.depth([*context[:-1], 0, 0]) == (len(context) - 1) // BLOCK * BLOCK == 48
        assert usage(await worker.ask([*context, 7, 7, 7])).cached_tokens == 48

    watch(scenario)


def test_a_batch_comes_before_the_deltas_of_its_step() -> None:
    async def main() -> None:
        spec = deployment()
        engine = SimEngine(spec, spec.pool("decode"), clock=VirtualClock())
        order: list[str] = []

        def deltas(batch: StepBatch) -> None:
            order.append("deltas")

        def kv(batch: KvBatch) -> None:
            order.append("kv")

        await engine.start(deltas, worker_id="w", epoch=1)
        assert engine.kv is not None
        engine.kv.subscribe(kv)
        prompts = FreshPrompts(random.Random(1))
        engine.submit([EngineRequest("r", token_ids(prompts.fresh(40)), prompts.greedy)])
        await VirtualClock().sleep(1.0)
        assert order[:2] == ["kv", "deltas"]
        await engine.stop()

    run_virtual(main())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_reported_foresees_every_hit(ranks: int) -> None:
    rng = random.Random(ranks)

    async def scenario(worker: Watched) -> None:
        seen: list[tuple[list[int], int, str, str | None]] = []
        hits = 0
        for _ in range(150):
            rank, salt, adapter = rng.randrange(ranks), rng.choice(["", "s"]), rng.choice([None, "sum"])
            prompt: list[int] = []
            if seen and rng.random() < 0.7:
                head, rank, salt, adapter = rng.choice(seen[-8:])
                prompt = head[: rng.randrange(1, len(head))]
            prompt = (prompt + worker.prompts.fresh(rng.randrange(1, 120)))[:400]
            predicted = worker.depth(prompt, rank, salt, adapter)
            done = await worker.ask(prompt, rank, salt, adapter)
            assert usage(done).cached_tokens == predicted
            hits += predicted > 0
            worker.engine.check_integrity()
            seen.append((prompt + done.choice().tokens, rank, salt, adapter))
        # Some were found, and the cache is too small for all.
        assert hits > 30
        assert max(worker.tree.held(group, 0) for group in worker.groups) <= 64

    watch(scenario, data_parallel_size=ranks)


def test_requests_side_by_side_leave_copies_that_are_gone_only_with_the_last() -> None:
    async def scenario(worker: Watched) -> None:
        prompt = worker.prompts.fresh(200)
        requests = [worker.bench.request(prompt, worker.prompts.greedy) for _ in range(3)]
        await worker.bench.run(*requests)
        worker.engine.check_integrity()
        for _ in range(8):
            predicted = worker.depth(prompt)
            assert usage(await worker.ask(prompt)).cached_tokens == predicted
            await worker.ask(worker.prompts.fresh(300))
            worker.engine.check_integrity()

    watch(scenario)


def test_each_rank_has_a_cache_of_its_own() -> None:
    async def scenario(worker: Watched) -> None:
        identity = worker.bench.identity
        assert (identity.data_parallel_size, identity.kv_blocks) == (2, 64)
        assert worker.engine.load().kv_blocks_total == 128
        prompt = worker.prompts.fresh(64)
        await worker.ask(prompt, rank=1)
        assert (worker.depth(prompt, rank=0), worker.depth(prompt, rank=1)) == (0, 48)
        assert usage(await worker.ask(prompt, rank=0)).cached_tokens == 0
        assert usage(await worker.ask(prompt, rank=1)).cached_tokens == 48

    watch(scenario, data_parallel_size=2)


def test_a_leg_that_names_no_rank_goes_to_the_emptiest() -> None:
    async def scenario(worker: Watched) -> None:
        prompts = [worker.prompts.fresh(64) for _ in range(3)]
        crowded = worker.bench.request(prompts[0], worker.prompts.sampling(max_tokens=200))
        worker.engine.submit([replace(crowded, data_parallel_rank=0)])
        await worker.bench.first_delta(crowded.request_id)
        await worker.ask(prompts[1])
        await worker.ask(prompts[2])
        assert [worker.depth([*p, 0], rank=1) for p in prompts] == [0, 64, 64]
        await worker.bench.ended(crowded.request_id)

    watch(scenario, data_parallel_size=2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    async def scenario(worker: Watched) -> None:
        done = await worker.ask(worker.prompts.fresh(20), rank=rank)
        assert done.last is not None
        assert done.last.error == "invalid_request"
        assert f"rank {rank} does not exist" in (done.last.error_message or "")

    watch(scenario, data_parallel_size=2)


def test_an_id_that_is_live_on_one_rank_is_refused_by_all() -> None:
    async def scenario(worker: Watched) -> None:
        request = worker.bench.request(worker.prompts.fresh(20), worker.prompts.sampling(max_tokens=50))
        worker.engine.submit([replace(request, data_parallel_rank=0)])
        await worker.bench.first_delta(request.request_id)
        worker.engine.submit([replace(request, data_parallel_rank=1)])
        await worker.bench.ended(request.request_id)
        assert [delta.error for delta in worker.bench.recorder.duplicates] == ["duplicate_request"]

    watch(scenario, data_parallel_size=2)


def test_a_prompt_moves_from_any_rank_to_any_rank_and_its_lease_ends() -> None:
    async def main() -> None:
        spec = deployment(data_parallel_size=2)
        clock, fabric = VirtualClock(), SimFabric()
        benches = []
        for pool in spec.pools:
            engine = SimEngine(spec, pool, clock=clock, fabric=fabric)
            benches.append(await start_bench(engine, pool.name))
        prefill, decode = benches
        prompts = FreshPrompts(random.Random(4))
        for source in (0, 1):
            for target in (0, 1):
                prompt = prompts.fresh(100)
                leg = prefill.request(prompt, prompts.greedy, leg=Leg.PREFILL)
                (offered,) = await prefill.run(replace(leg, data_parallel_rank=source))
                assert offered.last is not None
                assert prefill.engine.load().kv_blocks_leased == 7
                leg = decode.request(prompt, prompts.greedy, leg=Leg.DECODE, handoff=offered.last.handoff)
                (decoded,) = await decode.run(replace(leg, data_parallel_rank=target))
                assert usage(decoded).transferred_tokens == 100
                assert prefill.engine.load().kv_blocks_leased == 0
        for bench in benches:
            assert bench.recorder.violations == []
            await bench.engine.stop()

    run_virtual(main())


@pytest.mark.parametrize("changes", [{"kv_events": False}, {"prefix_caching": False}])
def test_an_engine_that_is_not_to_report_has_no_record_and_says_so(changes: dict[str, bool]) -> None:
    async def main() -> None:
        spec = deployment(**changes)
        engine = SimEngine(spec, spec.pool("decode"), clock=VirtualClock())
        assert engine.kv is None
        bench = await start_bench(engine, "w")
        assert not bench.identity.reports_kv
        prompts = FreshPrompts(random.Random(1))
        prompt = prompts.fresh(100)
        await bench.generate(prompt, prompts.greedy)
        again = await bench.generate(prompt, prompts.greedy)
        assert usage(again).cached_tokens == (96 if "kv_events" in changes else 0)
        engine.check_integrity()
        await engine.stop()

    run_virtual(main())
