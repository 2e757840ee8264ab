"""Clients that dawdle over headers and bodies, or send bombs: each is cut, and the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from dataclasses import dataclass

from kvasir_platform.sim.lab import gateway
from kvasir_platform.sim.lab.fleet import Fleet, Layout
from kvasir_platform.sim.lab.load import OpenLoop, asks, quantile
from kvasir_platform.sim.lab.processes import resident_bytes
from kvasir_platform.sim.lab.stream import Outcome
from load_tests.scenarios.scorecard_http import read_answer
from load_tests.scenarios.scorecard_rows.common import (
    Figure,
    NotProven,
    Trial,
    engine,
    exactness,
    exercise,
    whole,
)

PROMISE = "cut off"
CUT_S = 10.0
_PATIENCE_S = 40.0
_TRICKLE_S = 0.5
_BOMB_S = 0.02
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"


@dataclass(frozen=True, slots=True)
class Attack:
    """What a client begins with, and what it goes on with twice a second, or fifty times for a bomb; `status`
    is its answer, None where it is closed without one."""

    name: str
    first: bytes
    more: bytes
    status: int | None
    bomb: bool = False


ATTACKS = (
    Attack("silence", b"", b"", None),
    Attack("empty lines", b"\r\n", b"\r\n", None),
    Attack("slow headers", _HEAD, b"X: y\r\n", 408),
    Attack("a slow body", _HEAD + b"Content-Length: 100000\r\n\r\n", b"a", 408),
    Attack("slow chunks", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", 408),
    Attack("a bomb in one header", _HEAD + b"X: ", b"a" * 16384, 431, bomb=True),
    Attack("a bomb of headers", _HEAD, b"X: y\r\n" * 1000, 431, bomb=True),
    Attack("a bomb in the body", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
           b"10000\r\n" + b"a" * 65536 + b"\r\n", 413, bomb=True),
    Attack("a bomb of extensions", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
           b"1;" + b"x" * 8000 + b"\r\na\r\n", 413, bomb=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """`clients` of each attack, all at once, beside others at `rate` a second; `pairs` of windows with and
    without them."""

    workers: int = 2
    clients: int = 50
    rate: float = 10.0
    tokens: int = 30
    pairs: int = 3
    window_s: float = 20.0


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """See the module."""
    spec = engine(sim={"decode_step_s": 0.06, "decode_step_per_seq_s": 0.0})
    async with exercise(trial, whole(spec), Layout({"both": size.workers})) as fleet:
        outcomes: list[Outcome] = []
        changes, took, grown = [], list[float](), list[float]()
        for pair in range(size.pairs):
            calm, _, brisk = await _window(trial, fleet, size, 2 * pair, attacked=False)
            beside, cuts, under = await _window(trial, fleet, size, 2 * pair + 1, attacked=True)
            outcomes += [*calm, *beside]
            changes.append((under / brisk - 1.0) * 100)
            took += cuts.values()
            grown.append(resident_bytes(fleet.routers[0].process.pid) / 2**20)
            trial.say(
                f"p99 of gaps {brisk * 1e3:.1f} ms in peace, {under * 1e3:.1f} ms under attack; cut after "
                + ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in cuts.items())
            )
        series = await gateway.metrics(fleet.address)
        refused = {
            code: gateway.metric(series, "kvasir_requests_total", outcome=code)
            for code in ("header_timeout", "body_timeout", "headers_too_large", "body_too_large")
        }
    if not all(refused.values()):
        raise NotProven(f"the gateway refused {refused}")
    many = size.clients * len(ATTACKS)
    return [
        Figure("until the last of a kind is cut", max(took), "s", "lower", CUT_S,
               f"{len(ATTACKS)} kinds of {size.clients} clients, {size.pairs} times; {many} at once"),
        Figure("change of the others' p99 gap", statistics.median(changes), "%", "lower", 5.0,
               f"median of {size.pairs} pairs of windows: "
               + ", ".join(f"{change:+.1f} %" for change in changes)),
        Figure("memory of the router after each attack", max(grown) - min(grown), "MiB", "lower"),
        exactness(outcomes, "of the others"),
    ]  # fmt: skip


async def _window(
    trial: Trial, fleet: Fleet, size: Size, salt: int, *, attacked: bool
) -> tuple[list[Outcome], dict[str, float], float]:
    """The others' outcomes, the time until the last client of each attack was cut, the p99 of their gaps."""
    work = asks(trial.rng(salt), 64, size.tokens)
    load = OpenLoop([fleet.address], work, size.rate, clock=trial.clock, rng=trial.rng(20 + salt))
    load.start()
    start = trial.clock.now()
    cuts: dict[str, float] = {}
    if attacked:
        worst = await asyncio.gather(*(_all_cut(trial, fleet, attack, size.clients) for attack in ATTACKS))
        cuts = dict(zip((attack.name for attack in ATTACKS), worst, strict=True))
    await trial.clock.sleep(max(0.0, start + size.window_s - trial.clock.now()))
    outcomes = await load.stop()
    end = start + size.window_s
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s(start, end)]
    return outcomes, cuts, quantile(gaps, 0.99)


async def _all_cut(trial: Trial, fleet: Fleet, attack: Attack, clients: int) -> float:
    return max(await asyncio.gather(*(_one(trial, fleet.address, attack) for _ in range(clients))))


async def _one(trial: Trial, address: str, attack: Attack) -> float:
    """How long one client lasts. Raises NotProven when it is not cut, or not as it should be."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = trial.clock.now()
    sending = asyncio.ensure_future(_send(trial, writer, attack))
    try:
        async with asyncio.timeout(_PATIENCE_S):
            status: int | None = None
            with contextlib.suppress(EOFError, ConnectionError):
                status = (await read_answer(reader)).status
            took = trial.clock.now() - began
            with contextlib.suppress(ConnectionError):
                await reader.read()
    except TimeoutError as error:
        raise NotProven(f"{attack.name}: not cut within {_PATIENCE_S:g} s") from error
    finally:
        sending.cancel()
        writer.transport.abort()
    # A client that does not stop sending may lose the answer to the reset that ends it.
    if status != attack.status and not (attack.bomb and status is None):
        raise NotProven(f"{attack.name}: answered {status}, and not {attack.status}")
    return took


async def _send(trial: Trial, writer: asyncio.StreamWriter, attack: Attack) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(attack.first)
        while attack.more and not writer.is_closing():
            writer.write(attack.more)
            await writer.drain()
            await trial.clock.sleep(_BOMB_S if attack.bomb else _TRICKLE_S)
