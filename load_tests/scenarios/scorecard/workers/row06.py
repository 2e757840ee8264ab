"""One of two routers is killed: the other keeps serving, and a third has an EXACT index of a million blocks
within seconds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, LabRouter, Layout
from tests.kit.lab.load import asks, closed_loop, tally

from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    begin,
    engine,
    exactness,
    exercise,
    finished,
    whole,
)

PROMISE = "others serve; a new one rebuilds"
CUT = ("cut", "reset")


@dataclass(frozen=True, slots=True)
class Size:
    """`blocks` in total, one token each, put into the workers' caches by `prompts` of equal length; then
    `streams` through each of the two routers."""

    workers: int = 4
    blocks: int = 1 << 20
    prompts: int = 2000
    streams: int = 30
    tokens: int = 150


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    prompt = -(-size.blocks // size.prompts)
    # Blocks of one token make a large index from prompts that an engine on a small machine can compute.
    spec = engine(
        block_size=1,
        kv_cache_bytes=(size.blocks + 65_536) * 2048,
        max_num_batched_tokens=4096,
        sim={"prefill_tokens_per_s": 1e7},
    )
    deployment = whole(spec, model={"max_model_len": prompt + 1024})
    layout = Layout({"both": size.workers}, routers=2)
    async with exercise(trial, deployment, layout) as fleet:
        survivor, victim = fleet.routers
        work = asks(trial.rng(1), prompt, 1)
        filling = [next(work) for _ in range(size.prompts)]
        filled = await closed_loop(survivor.address, filling, size.workers, trial.clock)
        if not tally(filled).all_exact:
            raise NotProven(f"the caches were not filled: {tally(filled).errors}")
        held = await _exact(fleet, survivor, prompt * size.prompts)
        trial.say(f"{held:,} blocks are known")
        small = asks(trial.rng(2), 64, size.tokens)
        theirs, ours = await asyncio.gather(
            begin(fleet, victim.address, small, size.streams),
            begin(fleet, survivor.address, small, size.streams),
        )
        await victim.process.kill()
        lost = await finished(theirs)
        cut = sum(outcome.error in CUT for outcome in lost)
        if not cut:
            raise NotProven("no stream was running on the router when it was killed")
        began = trial.clock.now()
        fresh = await fleet.add_router()
        listening_s = trial.clock.now() - began
        known = await _exact(fleet, fresh, prompt * size.prompts)
        exact_s = trial.clock.now() - began
        trial.say(f"{known:,} blocks exact after {exact_s:.2f} s")
        kept = await finished(ours)
        after = await closed_loop(fresh.address, [next(small) for _ in range(8)], 8, trial.clock)
    return [
        Figure(
            "until a fresh router knows all blocks exactly", exact_s, "s", "lower", 5.0,
            f"{known:,} blocks of {size.prompts:,} prompts on {size.workers} workers, from the start of its "
            f"process; it listened after {listening_s:.2f} s",
        ),
        Figure("blocks known exactly by it", known, "blocks", "higher", prompt * size.prompts),
        Figure("streams of the killed router that were cut", cut, "streams", "lower", None,
               f"of {len(lost)}"),
        exactness([*kept, *after], "through the other router, and through the fresh one"),
    ]  # fmt: skip


async def _exact(fleet: Fleet, router: LabRouter, blocks: int) -> int:
    """Wait until a router's index is EXACT for every worker and holds at least that many blocks."""
    known = 0

    async def exact() -> bool:
        nonlocal known
        views = (await gateway.workers(router.address)).values()
        pictures = [view["kv"] for view in views if view["kv"]]
        known = sum(picture["blocks"] for picture in pictures)
        everywhere = len(pictures) == len(fleet.pool("both"))
        return everywhere and known >= blocks and all(p["state"] == "exact" for p in pictures)

    await gateway.until(exact, 120.0, f"{blocks:,} blocks exact", fleet.clock, 0.05)
    return known
