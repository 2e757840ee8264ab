"""Prefill on one vLLM engine, decode on another, each in its own process: the same tokens as on one.

Real engines on tiny models, float32 and one thread each, so that equal KV gives equal tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import psutil
import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench
from tests.kit.engines.recorder import Recorded
from tests.kit.shared.engines import EngineRegistry, engines_of
from tests.kit.shared.specs import BLOCK, PLAIN

from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import Delta, KvHandoff, Leg, Sampling, Usage

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
LENGTHS = (1, 2, 31, 32, 33, 64, 500, 1500, 2000)


@dataclass
class Pair:
    """Two engines, whose KV moves by `kind`. `rng` makes prompts that no engine has seen."""

    kind: str
    prefill: EngineBench
    decode: EngineBench
    rng: random.Random

    def prompt(self, length: int) -> list[int]:
        return [100 + self.rng.randrange(3900) for _ in range(length)]

    async def handoff(self, prompt: list[int]) -> KvHandoff:
        done = await self.prefill.generate(prompt, GREEDY, leg=Leg.PREFILL)
        handoff = last(done).handoff
        assert handoff is not None, last(done).error_message
        return handoff

    async def apart(self, prompt: list[int]) -> Recorded:
        return await self.decode.generate(prompt, GREEDY, leg=Leg.DECODE, handoff=await self.handoff(prompt))

    async def together(self, prompt: list[int]) -> list[int]:
        """Both on the prefill engine, on KV of its own: the salt hides what is cached."""
        done = await self.prefill.generate(prompt, GREEDY, salt="aggregated")
        return done.choice().tokens

    async def leases_end(self) -> None:
        """Return when the prefill engine has no block on lease."""
        async with asyncio.timeout(30):
            while self.prefill.engine.load().kv_blocks_leased:
                await self.prefill.generate([7], GREEDY)


def last(done: Recorded) -> Delta:
    assert done.last is not None
    return done.last


def usage(done: Recorded) -> Usage:
    found = last(done).usage
    assert found is not None
    return found


def needed_blocks(prompt: list[int]) -> int:
    """Blocks that hold the tokens before the last one, which is computed by the decoding engine."""
    return -(-(len(prompt) - 1) // BLOCK)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["nixl", "nccl"])
async def pair(request: pytest.FixtureRequest, engines: EngineRegistry, over_nccl: Deployment) -> Pair:
    """kvasir-tiny over NIXL, and gemma3 over NCCL."""
    prefill, decode = await engines.running(*engines_of({"nixl": PLAIN, "nccl": over_nccl}[request.param]))
    return Pair(request.param, prefill, decode, random.Random(11))


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_are_those_of_one_engine_and_bytes_those_of_the_missing_blocks(
    pair: Pair, length: int
) -> None:
    prompt = pair.prompt(length)
    before = pair.decode.engine.load()
    apart = await pair.apart(prompt)
    after = pair.decode.engine.load()
    assert apart.choice().tokens == await pair.together(prompt)
    moved = needed_blocks(prompt) * pair.decode.identity.kv.bytes_per_block
    assert usage(apart).transferred_bytes == moved
    assert usage(apart).transferred_tokens == length - 1
    assert usage(apart).cached_tokens == 0
    assert after.transfer_bytes_received - before.transfer_bytes_received == moved
    assert after.transfers_received - before.transfers_received == (1 if moved else 0)
    assert after.transfers_failed == before.transfers_failed


async def test_only_blocks_that_the_decoding_engine_lacks_are_moved(pair: Pair) -> None:
    known = pair.prompt(500)
    await pair.apart(known)
    prompt = known[: 10 * BLOCK] + pair.prompt(700)
    apart = await pair.apart(prompt)
    assert apart.choice().tokens == await pair.together(prompt)
    missing = needed_blocks(prompt) - 10
    assert usage(apart).transferred_bytes == missing * pair.decode.identity.kv.bytes_per_block
    assert usage(apart).cached_tokens == 10 * BLOCK


async def test_a_prompt_that_the_decoding_engine_holds_moves_nothing_and_ends_the_lease(pair: Pair) -> None:
    prompt = pair.prompt(65)
    await pair.apart(prompt)
    again = await pair.apart(prompt)
    assert again.choice().tokens == await pair.together(prompt)
    assert usage(again).transferred_bytes == 0
    await pair.leases_end()


async def test_many_requests_at_once_get_their_own_kv(pair: Pair) -> None:
    prompts = [pair.prompt(length) for length in (40, 300, 33, 700, 64, 129, 500, 2)]
    apart = await asyncio.gather(*(pair.apart(prompt) for prompt in prompts))
    together = [await pair.together(prompt) for prompt in prompts]
    assert [done.choice().tokens for done in apart] == together
    await pair.leases_end()


async def test_a_released_hand_off_is_computed_again_and_counted(pair: Pair) -> None:
    prompt = pair.prompt(200)
    before = pair.decode.engine.load()
    handoff = await pair.handoff(prompt)
    pair.prefill.engine.release([handoff.lease_id])
    await pair.leases_end()
    done = await pair.decode.generate(prompt, GREEDY, leg=Leg.DECODE, handoff=handoff)
    assert done.choice().tokens == await pair.together(prompt)
    assert usage(done).transferred_bytes == 0
    assert usage(done).cached_tokens == 0
    after = pair.decode.engine.load()
    assert after.transfers_failed - before.transfers_failed == 1
    assert after.transfers_received == before.transfers_received


async def test_a_garbled_ticket_is_computed_again(pair: Pair) -> None:
    prompt = pair.prompt(100)
    handoff = await pair.handoff(prompt)
    garbled = KvHandoff(handoff.lease_id, handoff.fence, handoff.ttl_s, handoff.blocks, b"garbage")
    done = await pair.decode.generate(prompt, GREEDY, leg=Leg.DECODE, handoff=garbled)
    assert done.choice().tokens == await pair.together(prompt)
    pair.prefill.engine.release([handoff.lease_id])
    await pair.leases_end()


async def test_requests_aborted_around_their_pull_leak_no_block(pair: Pair) -> None:
    for _ in range(20):
        prompt = pair.prompt(900)
        request = pair.decode.request(prompt, GREEDY, leg=Leg.DECODE, handoff=await pair.handoff(prompt))
        pair.decode.engine.submit([request])
        await asyncio.sleep(pair.rng.random() * 0.006)
        pair.decode.engine.abort([request.request_id])
        await pair.decode.ended(request.request_id)
    prompt = pair.prompt(900)
    assert (await pair.apart(prompt)).choice().tokens == await pair.together(prompt)
    await pair.leases_end()


# What is shown is the engine's, whichever adapter moves the bytes.
ONE_ADAPTER = pytest.mark.parametrize(
    "pair", ["nixl", pytest.param("nccl", marks=pytest.mark.soak)], indirect=True, scope="module"
)


@ONE_ADAPTER
async def test_no_engine_spins_when_nothing_runs(pair: Pair) -> None:
    await pair.apart(pair.prompt(100))
    await pair.leases_end()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before = {p.pid: sum(p.cpu_times()[:2]) for p in family}
    began = time.monotonic()
    await asyncio.sleep(5)
    elapsed = time.monotonic() - began
    cores = {p.pid: (sum(p.cpu_times()[:2]) - before[p.pid]) / elapsed for p in family if p.is_running()}
    print("idle cores by process:", {pid: round(value, 3) for pid, value in cores.items()})  # noqa: T201
    # A thread that polls without rest takes most of a core; what the idle stack costs is a bench's figure.
    assert max(cores.values()) < 0.5, cores


async def test_kv_of_another_prompt_gives_other_tokens(pair: Pair) -> None:
    """The control: if the moved bytes did not decide the tokens, the tests above would prove nothing."""
    for length in (33, 64, 500):
        prompt, other = pair.prompt(length), pair.prompt(length)
        apart = await pair.decode.generate(prompt, GREEDY, leg=Leg.DECODE, handoff=await pair.handoff(other))
        assert usage(apart).transferred_tokens == length - 1
        assert apart.choice().tokens != await pair.together(prompt)
