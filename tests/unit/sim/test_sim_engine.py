"""The simulated engine's own behaviour: time, transfers and failure, under virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench

from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    ModelSpec,
    PoolSpec,
    SimSpec,
    SpeculativeSpec,
    TransferSpec,
)
from kvasir.core.errors import ConfigError
from kvasir.core.requests import (
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    Role,
    Sampling,
    StepBatch,
    Timings,
    token_ids,
)
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.engines.sim.fabric import SimFabric, SimTicket

TIMING = SimSpec(
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    decode_step_per_seq_s=0.001,
    transfer_bytes_per_s=65_536_000.0,
    transfer_latency_s=0.5,
)
# 32 tokens of kvasir-tiny's KV: a millisecond on the link.
BLOCK_BYTES = 65_536
ENGINE = EngineSpec(kind="sim", block_size=32, kv_cache_bytes=64 * BLOCK_BYTES, sim=TIMING)


def _deployment(engine: EngineSpec = ENGINE, transfer: TransferSpec | None = None) -> Deployment:
    return Deployment(
        model=ModelSpec(max_model_len=1024),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        ),
        transfer=transfer or TransferSpec(lease_s=20.0, timeout_s=5.0),
    )


@dataclass
class Pair:
    """A prefill and a decode engine on one fabric."""

    prefill: EngineBench
    decode: EngineBench
    prefill_engine: SimEngine
    decode_engine: SimEngine
    fabric: SimFabric
    clock: VirtualClock
    prompts: FreshPrompts

    async def prefilled(self, prompt: list[int]) -> KvHandoff:
        recorded = await self.prefill.generate(prompt, self.prompts.greedy, leg=Leg.PREFILL)
        assert recorded.last is not None
        assert recorded.last.handoff is not None
        return recorded.last.handoff

    def check_integrity(self) -> None:
        self.prefill_engine.check_integrity()
        self.decode_engine.check_integrity()
        assert self.prefill.recorder.violations == self.decode.recorder.violations == []


def with_pair(
    scenario: Callable[[Pair], Awaitable[None]],
    deployment: Deployment | None = None,
    *,
    shared_fabric: bool = True,
) -> None:
    """Run `scenario` under virtual time; nothing may be left held at its end."""

    async def main() -> None:
        spec = deployment or _deployment()
        clock, fabric = VirtualClock(), SimFabric()
        reach = fabric if shared_fabric else None
        prefill = SimEngine(spec, spec.pool("prefill"), clock=clock, fabric=reach)
        decode = SimEngine(spec, spec.pool("decode"), clock=clock, fabric=reach)
        pair = Pair(
            prefill=await start_bench(prefill, "prefill-0"),
            decode=await start_bench(decode, "decode-0"),
            prefill_engine=prefill,
            decode_engine=decode,
            fabric=fabric,
            clock=clock,
            prompts=FreshPrompts(random.Random(5)),
        )
        await scenario(pair)
        pair.check_integrity()
        await prefill.stop()
        await decode.stop()
        pair.check_integrity()

    run_virtual(main())


def test_a_request_takes_the_time_that_the_timing_model_says() -> None:
    async def scenario(pair: Pair) -> None:
        done = await pair.decode.generate(pair.prompts.fresh(200), pair.prompts.sampling(max_tokens=11))
        # One step computes the prompt, ten more a token each.
        assert pair.clock.now() == pytest.approx(0.2 + 11 * 0.011)
        assert done.last is not None
        assert done.last.timings is not None
        assert done.last.timings.prefill_s == pytest.approx(0.211)
        assert done.last.timings.decode_s == pytest.approx(0.11)

    with_pair(scenario)


def test_a_cached_prefix_shortens_the_prefill() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(330)
        await pair.decode.generate(prompt, pair.prompts.sampling(max_tokens=1))
        cold = pair.clock.now()
        await pair.decode.generate(prompt, pair.prompts.sampling(max_tokens=1))
        assert cold == pytest.approx(0.341)
        assert pair.clock.now() - cold == pytest.approx(0.01 + 0.001 + 0.010)

    with_pair(scenario)


def test_a_long_prompt_is_chunked_and_others_decode_between_its_chunks() -> None:
    async def scenario(pair: Pair) -> None:
        short = pair.decode.request(pair.prompts.fresh(10), pair.prompts.sampling(max_tokens=50))
        long = pair.decode.request(pair.prompts.fresh(900), pair.prompts.sampling(max_tokens=1))
        pair.decode.engine.submit([short])
        recorded = await pair.decode.first_delta(short.request_id)
        pair.decode.engine.submit([long])
        await pair.decode.ended(long.request_id)
        assert 9 <= len(recorded.choice().tokens) <= 12
        await pair.decode.ended(short.request_id)

    with_pair(scenario, _deployment(ENGINE.model_copy(update={"max_num_batched_tokens": 100})))


def test_a_transfer_takes_latency_and_bandwidth_and_ends_the_lease() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(320)
        handoff = await pair.prefilled(prompt)
        assert handoff.blocks == 10
        assert pair.prefill.engine.load().kv_blocks_leased == 10
        decoded = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        assert decoded.last is not None
        assert decoded.last.timings is not None
        assert decoded.last.timings.transfer_s == pytest.approx(0.51)
        # One step for the last prompt token, whose output did not travel.
        assert decoded.last.timings.prefill_s == pytest.approx(0.01 + 0.001 + 0.001)
        assert pair.prefill.engine.load().kv_blocks_leased == 0

    with_pair(scenario)


def test_transfers_from_one_worker_share_its_link() -> None:
    async def scenario(pair: Pair) -> None:
        prompts = [pair.prompts.fresh(640) for _ in range(2)]
        handoffs = [await pair.prefilled(prompt) for prompt in prompts]
        requests = [
            pair.decode.request(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
            for prompt, handoff in zip(prompts, handoffs, strict=True)
        ]
        ended = await pair.decode.run(*requests)
        waits = [
            e.last.timings.transfer_s for e in ended if e.last is not None and e.last.timings is not None
        ]
        assert waits == [pytest.approx(0.52), pytest.approx(0.54)]

    with_pair(scenario)


def test_a_lease_that_nobody_pulls_ends_by_itself() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.prefilled(pair.prompts.fresh(100))
        await pair.clock.sleep(19.9)
        assert pair.prefill.engine.load().kv_blocks_leased == 4
        await pair.clock.sleep(0.2)
        assert pair.prefill.engine.load().kv_blocks_leased == 0

    with_pair(scenario)


def test_leased_blocks_make_a_prompt_wait_until_the_lease_ends() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.prefilled(pair.prompts.fresh(1000))
        await pair.prefilled(pair.prompts.fresh(1000))
        before = pair.clock.now()
        await pair.prefill.generate(pair.prompts.fresh(500), pair.prompts.greedy)
        assert pair.clock.now() - before > 18

    with_pair(scenario)


def _cut(pair: Pair) -> None:
    pair.fabric.cut("prefill-0")


def _crash(pair: Pair) -> None:
    pair.prefill_engine.crash("lost")


def _release_all(pair: Pair) -> None:
    pair.prefill.engine.release(["prefill-0/1/0/1"])


@pytest.mark.parametrize("trouble", [_cut, _crash, _release_all])
@pytest.mark.parametrize("early", [True, False])
def test_a_pull_that_cannot_succeed_is_made_up_for_by_computing(
    trouble: Callable[[Pair], None], early: bool
) -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(100)
        handoff = await pair.prefilled(prompt)
        if early:
            trouble(pair)
        request = pair.decode.request(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        pair.decode.engine.submit([request])
        await pair.clock.sleep(0.1)
        if not early:
            trouble(pair)
        decoded = await pair.decode.ended(request.request_id)
        assert decoded.last is not None
        assert decoded.last.timings is not None
        assert decoded.last.timings.transfer_s == (0.0 if early else pytest.approx(0.504))
        full = await pair.decode.generate(prompt, pair.prompts.greedy)
        load = pair.decode.engine.load()
        assert decoded.choice().tokens == full.choice().tokens
        assert (load.transfers_failed, load.transfers_received, load.transfer_bytes_received) == (1, 0, 0)

    with_pair(scenario)


def test_a_pull_that_fails_ends_the_request_when_the_deployment_says_so() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(100)
        handoff = await pair.prefilled(prompt)
        pair.fabric.cut("prefill-0")
        done = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        assert done.last is not None
        assert (done.last.finish, done.last.error) == (FinishReason.ERROR, "transfer_failed")
        assert "unreachable" in (done.last.error_message or "")
        pair.fabric.heal("prefill-0")
        again = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        assert again.choice().finish is FinishReason.LENGTH

    with_pair(scenario, _deployment(transfer=TransferSpec(on_failure="fail")))


def test_a_pull_slower_than_its_timeout_fails_after_it() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(100)
        handoff = await pair.prefilled(prompt)
        before = pair.clock.now()
        decoded = await pair.decode.generate(
            prompt, pair.prompts.sampling(max_tokens=1), leg=Leg.DECODE, handoff=handoff
        )
        assert pair.clock.now() - before == pytest.approx(0.4 + 0.111)
        assert decoded.last is not None
        assert decoded.last.usage is not None
        assert decoded.last.usage.transferred_bytes == 0

    with_pair(scenario, _deployment(transfer=TransferSpec(timeout_s=0.5)))


def test_a_handoff_of_an_earlier_life_is_fenced() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(64)
        handoff = await pair.prefilled(prompt)
        ticket = replace(SimTicket.decode(handoff.ticket), epoch=0)
        stale = replace(handoff, ticket=ticket.encode())
        done = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=stale)
        wrong_fence = replace(handoff, fence=handoff.fence + 1)
        other = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=wrong_fence)
        assert done.choice().tokens == other.choice().tokens
        assert pair.decode.engine.load().transfers_failed == 2
        assert pair.prefill.engine.load().kv_blocks_leased == 2

    with_pair(scenario)


@pytest.mark.parametrize("ticket", [b"", b"\xc1", SimTicket("prefill-0", 1, (b"other",)).encode()])
def test_a_handoff_that_does_not_fit_the_prompt_is_not_used(ticket: bytes) -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(64)
        handoff = replace(await pair.prefilled(prompt), ticket=ticket)
        done = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        assert done.choice().finish is FinishReason.LENGTH
        assert pair.decode.engine.load().transfers_failed == 1

    with_pair(scenario)


def test_without_a_fabric_the_ticket_suffices_and_release_ends_the_lease() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(100)
        handoff = await pair.prefilled(prompt)
        decoded = await pair.decode.generate(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        full = await pair.prefill.generate(prompt, pair.prompts.greedy)
        assert decoded.choice().tokens == full.choice().tokens
        assert pair.decode.engine.load().transfer_bytes_received == 4 * BLOCK_BYTES
        assert pair.prefill.engine.load().kv_blocks_leased == 4
        pair.prefill.engine.release([handoff.lease_id])
        assert pair.prefill.engine.load().kv_blocks_leased == 0

    with_pair(scenario, shared_fabric=False)


CHUNKED = ENGINE.model_copy(update={"max_num_batched_tokens": 100})


@dataclass
class Overlap:
    """A prompt of several chunks that is pulled from its first one on."""

    pair: Pair
    prompt: list[int]
    prefill: EngineRequest
    decode: EngineRequest

    @classmethod
    async def begin(cls, pair: Pair, length: int = 500) -> Overlap:
        prompt = pair.prompts.fresh(length)
        prefill = pair.prefill.request(prompt, pair.prompts.greedy, leg=Leg.PREFILL)
        pair.prefill.engine.submit([prefill])
        recorded = await pair.prefill.first_delta(prefill.request_id)
        assert recorded.last is None
        decode = pair.decode.request(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=recorded.offered)
        pair.decode.engine.submit([decode])
        return cls(pair, prompt, prefill, decode)

    async def check_tokens(self) -> Timings:
        decoded = await self.pair.decode.ended(self.decode.request_id)
        full = await self.pair.decode.generate(self.prompt, self.pair.prompts.greedy)
        assert decoded.choice().tokens == full.choice().tokens
        assert decoded.last is not None
        assert decoded.last.timings is not None
        return decoded.last.timings


def test_a_prompt_of_several_chunks_is_pulled_while_it_is_computed() -> None:
    async def scenario(pair: Pair) -> None:
        overlap = await Overlap.begin(pair)
        offered_at = pair.clock.now()
        prefilled = await pair.prefill.ended(overlap.prefill.request_id)
        computed_at = pair.clock.now()
        assert offered_at == pytest.approx(0.111)
        assert computed_at == pytest.approx(5 * 0.111)
        assert prefilled.last is not None
        assert prefilled.last.handoff == overlap.decode.handoff
        timings = await overlap.check_tokens()
        # The first part is three blocks, the second all others.
        assert timings.transfer_s == pytest.approx(0.503 + 0.513)
        load = pair.decode.engine.load()
        assert (load.transfers_received, load.transfer_bytes_received) == (1, 16 * BLOCK_BYTES)
        assert pair.prefill.engine.load().kv_blocks_leased == 0

    with_pair(scenario, _deployment(CHUNKED))


@pytest.mark.parametrize(
    ("chunked", "overlap", "fabric"), [(True, False, True), (False, True, True), (True, True, False)]
)
def test_kv_is_offered_at_the_end_of_a_prompt_that_nobody_can_pull_before(
    chunked: bool, overlap: bool, fabric: bool
) -> None:
    async def scenario(pair: Pair) -> None:
        request = pair.prefill.request(pair.prompts.fresh(500), pair.prompts.greedy, leg=Leg.PREFILL)
        recorded = (await pair.prefill.run(request))[0]
        assert recorded.deltas == 1

    engine = CHUNKED.model_copy(update={"chunked_prefill": chunked})
    deployment = _deployment(engine, TransferSpec(overlap="always" if overlap else "never"))
    with_pair(scenario, deployment, shared_fabric=fabric)


def test_blocks_that_are_offered_early_are_free_after_an_abort_and_their_puller_computes() -> None:
    async def scenario(pair: Pair) -> None:
        overlap = await Overlap.begin(pair)
        assert pair.prefill.engine.load().kv_blocks_leased == 3
        pair.prefill.engine.abort([overlap.prefill.request_id])
        assert pair.prefill.engine.load().kv_blocks_leased == 0
        await overlap.check_tokens()
        assert pair.decode.engine.load().transfers_failed == 1

    with_pair(scenario, _deployment(CHUNKED))


@pytest.mark.parametrize("trouble", [_cut, _crash, _release_all])
def test_a_pull_that_breaks_off_half_way_is_made_up_for_by_computing(trouble: Callable[[Pair], None]) -> None:
    async def scenario(pair: Pair) -> None:
        overlap = await Overlap.begin(pair)
        await pair.clock.sleep(0.3)
        trouble(pair)
        await overlap.check_tokens()
        load = pair.decode.engine.load()
        assert (load.transfers_failed, load.transfers_received, load.transfer_bytes_received) == (1, 0, 0)

    with_pair(scenario, _deployment(CHUNKED))


@pytest.mark.parametrize(("timeout_s", "failed"), [(0.75, 0), (0.5, 1)])
def test_the_patience_of_a_pull_counts_from_its_last_progress(timeout_s: float, failed: int) -> None:
    async def scenario(pair: Pair) -> None:
        overlap = await Overlap.begin(pair, 900)
        await overlap.check_tokens()
        assert pair.decode.engine.load().transfers_failed == failed

    # Each of eight chunks takes half a second.
    slow = CHUNKED.model_copy(
        update={
            "sim": TIMING.model_copy(update={"prefill_tokens_per_s": 205.0, "transfer_latency_s": 0.001}),
        }
    )
    with_pair(scenario, _deployment(slow, TransferSpec(timeout_s=timeout_s)))


def test_the_kv_of_several_choices_is_pulled_once_and_shared() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(100)
        sampling = pair.prompts.sampling(n=3, temperature=1.0, seed=4)
        handoff = await pair.prefilled(prompt)
        decoded = await pair.decode.generate(prompt, sampling, leg=Leg.DECODE, handoff=handoff)
        full = await pair.prefill.generate(prompt, sampling)
        assert [decoded.choice(i).tokens for i in range(3)] == [full.choice(i).tokens for i in range(3)]
        assert decoded.last is not None
        assert decoded.last.usage is not None
        assert decoded.last.usage.transferred_bytes == 4 * BLOCK_BYTES

    with_pair(scenario)


def test_an_abort_during_a_pull_frees_the_blocks_at_once() -> None:
    async def scenario(pair: Pair) -> None:
        prompt = pair.prompts.fresh(100)
        handoff = await pair.prefilled(prompt)
        request = pair.decode.request(prompt, pair.prompts.greedy, leg=Leg.DECODE, handoff=handoff)
        pair.decode.engine.submit([request])
        await pair.clock.sleep(0.1)
        assert pair.decode.engine.load().waiting == 1
        pair.decode.engine.abort([request.request_id])
        done = await pair.decode.ended(request.request_id)
        assert pair.clock.now() == pytest.approx(0.111 + 0.1)
        assert done.choice().finish is FinishReason.ABORT
        assert pair.decode.engine.load().kv_usage == 0.0
        await pair.clock.sleep(30)

    with_pair(scenario)


def test_a_crash_ends_every_request_and_refuses_later_ones() -> None:
    async def scenario(pair: Pair) -> None:
        requests = [pair.decode.request(pair.prompts.fresh(50), pair.prompts.greedy) for _ in range(3)]
        pair.decode.engine.submit(requests)
        await pair.decode.first_delta(requests[0].request_id)
        pair.decode_engine.crash("the host burned")
        assert await pair.decode.engine.wait_failed() == "the host burned"
        late = pair.decode.request(pair.prompts.fresh(5), pair.prompts.greedy)
        pair.decode.engine.submit([late])
        for request in [*requests, late]:
            done = await pair.decode.ended(request.request_id)
            assert done.last is not None
            assert (done.last.error, done.last.error_message) == ("engine_dead", "the host burned")

    with_pair(scenario)


def test_stop_in_mid_flight_leaves_nothing_held() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.prefilled(pair.prompts.fresh(100))
        request = pair.prefill.request(pair.prompts.fresh(50), pair.prompts.greedy)
        pair.prefill.engine.submit([request])
        await pair.prefill.first_delta(request.request_id)
        await pair.prefill.engine.stop()
        load = pair.prefill.engine.load()
        assert (load.running, load.waiting, load.kv_usage, load.kv_blocks_leased) == (0, 0, 0.0, 0)

    with_pair(scenario)


def test_a_sink_that_breaks_is_the_death_of_the_engine() -> None:
    async def main() -> str:
        spec = _deployment()
        engine = SimEngine(spec, spec.pool("decode"), clock=VirtualClock())

        def broken(batch: StepBatch) -> None:
            raise LookupError("nobody listens")

        await engine.start(broken, worker_id="w", epoch=1)
        engine.submit([EngineRequest("r", token_ids([1, 2, 3]), Sampling())])
        reason = await engine.wait_failed()
        await engine.stop()
        return reason

    assert "nobody listens" in run_virtual(main())


def test_too_many_live_requests_are_refused() -> None:
    async def main() -> None:
        spec = _deployment()
        prompts = FreshPrompts(random.Random(1))
        bench = await start_bench(SimEngine(spec, spec.pool("decode"), clock=VirtualClock(), max_live=2), "w")
        ended = await bench.run(*(bench.request(prompts.fresh(9), prompts.greedy) for _ in range(3)))
        assert [e.last.error for e in ended if e.last] == [None, None, "no_capacity"]
        await bench.engine.stop()

    run_virtual(main())


def test_what_the_simulation_does_not_model_is_refused_at_start() -> None:
    async def start(**changes: object) -> None:
        spec = _deployment(ENGINE.model_copy(update=changes))
        await SimEngine(spec, spec.pool("decode"), clock=VirtualClock()).start(
            lambda batch: None, worker_id="w", epoch=1
        )

    with pytest.raises(ConfigError, match="speculate"):
        run_virtual(start(speculative=SpeculativeSpec()))
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        run_virtual(start(kv_cache_bytes=1 << 20))


def test_two_runs_give_the_same_trace() -> None:
    def trace() -> list[tuple[float, str, tuple[int, ...]]]:
        seen: list[tuple[float, str, tuple[int, ...]]] = []

        async def scenario(pair: Pair) -> None:
            inner = pair.decode.recorder

            def spy(batch: StepBatch) -> None:
                seen.extend((pair.clock.now(), d.request_id, d.token_ids) for d in batch.deltas)
                inner(batch)

            spec = _deployment()
            engine = SimEngine(spec, spec.pool("decode"), clock=pair.clock)
            await engine.start(spy, worker_id="spied", epoch=1)
            requests = [
                pair.decode.request(pair.prompts.fresh(50 + i), pair.prompts.greedy) for i in range(10)
            ]
            for request in requests:
                engine.submit([request])
                await pair.clock.sleep(0.013)
            await asyncio.gather(*(inner.wait(request.request_id) for request in requests))
            await engine.stop()

        with_pair(scenario)
        return seen

    assert trace() == trace()
