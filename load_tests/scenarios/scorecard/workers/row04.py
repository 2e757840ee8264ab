"""SIGSTOP of one worker in eight: its connections stay open and silent, and it is ejected."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kit.lab.fleet import Layout
from tests.kit.lab.gateway import until
from tests.kit.lab.load import OpenLoop, asks, tally

from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    exactness,
    exercise,
    seen,
    split,
    usable,
)

PROMISE = "ejected passively"
HURT_S = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """Apply load for `before_s`, then stop a worker for `frozen_s`."""

    decode: int = 8
    prefill: int = 2
    rate: float = 20.0
    tokens: int = 30
    before_s: float = 4.0
    frozen_s: float = 8.0


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    layout = Layout({"prefill": size.prefill, "decode": size.decode})
    async with exercise(trial, split(), layout) as fleet:
        load = OpenLoop(
            [fleet.address],
            asks(trial.rng(1), 64, size.tokens),
            size.rate,
            clock=trial.clock,
            rng=trial.rng(2),
        )
        load.start()
        await trial.clock.sleep(size.before_s)
        victim = fleet.pool("decode")[0]

        async def busy() -> bool:
            return bool((await seen(fleet.address, victim))["in_flight"])

        await until(busy, 10.0, f"a stream on {victim.name}", trial.clock)
        proof = await victim.running.freeze()
        frozen_at = trial.clock.now()

        async def out() -> bool:
            return not usable(await seen(fleet.address, victim))

        out_s = await until(out, 30.0, f"{victim.name} gets no requests", trial.clock)
        trial.say(f"without requests after {out_s:.2f} s")
        await trial.clock.sleep(max(0.0, size.frozen_s - out_s))
        if victim.running.proof().state != "T":
            raise NotProven(f"{victim.name} was not stopped all the time: {victim.running.proof()}")
        await victim.running.thaw()
        back_s = await fleet.all_ready()
        await trial.clock.sleep(2.0)
        outcomes = await load.stop()
    sent = [o.sent_s - frozen_at for o in outcomes if o.ttft_s > HURT_S or o.longest_gap_s > HURT_S]
    hurt = [each for each in sent if each > 0]
    return [
        Figure(
            "until the router says that it gives the worker nothing", out_s, "s", "lower", 2.0,
            f"SIGSTOP, state {proof.state} in /proc; ready again {back_s:.2f} s after SIGCONT",
        ),
        Figure(
            "until the last request was sent that waited for the frozen worker",
            max(hurt, default=0.0), "s", "lower", 2.0,
            f"{len(hurt)} requests sent after the freeze, and {len(sent) - len(hurt)} before, "
            f"stalled for more than {HURT_S:g} s",
        ),
        Figure("p99 of the longest gap", tally(outcomes).gap_p99_s, "s", "lower"),
        exactness(outcomes),
    ]  # fmt: skip
