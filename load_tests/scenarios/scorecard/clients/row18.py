"""Malformed and smuggling requests, directly and through HAProxy: all are answered as required, no client
gets another's answer, and the gateway keeps serving."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.programs import missing

from load_tests.scenarios.haproxy import haproxy
from load_tests.scenarios.scorecard.clients.http_cases import CASES, Case, send
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial, exercise, whole

PROMISE = "no desync, no crash"
_NOTHING = Case("nothing", b"", (), closes=False)
_MUST_BE_400 = ("length and coding", "coding after length", "lines that end in a bare LF",
                "one header that ends in a bare LF", "chunks that end in a bare LF")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """`victims` clients send a request through the proxy after each case."""

    victims: int = 3
    rounds: int = 2


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    async with exercise(trial, whole(), Layout({"both": 1})) as fleet:
        pid = fleet.routers[0].process.pid
        host, _, port = fleet.address.rpartition(":")
        wrong = [name for _ in range(size.rounds) for name in await _fast_path(host, int(port))]
        if any(name in _MUST_BE_400 for name in wrong):
            raise NotProven(f"not answered 400: {wrong}")
        desyncs: list[str] = []
        if (no_proxy := missing("haproxy")) is None:
            for _ in range(size.rounds):
                desyncs += await _proxied(trial, fleet, size.victims)
        crashes = 0 if fleet.routers[0].process.alive and fleet.routers[0].process.pid == pid else 1
    figures = [
        Figure("cases", len(CASES), "cases", "higher", 40.0),
        Figure("cases that are not answered as they must be", len(wrong), "cases", "lower", 0.0,
               ", ".join(wrong)[:200]),
        Figure("crashes", crashes, "", "lower", 0.0),
    ]  # fmt: skip
    if no_proxy is None:
        note = f"HAProxy, one connection to the gateway for all; {', '.join(desyncs)[:200] or 'none'}"
        figures.append(Figure("answers that went to another client", len(desyncs), "", "lower", 0.0, note))
    else:
        trial.say(f"{no_proxy}; nothing is said of proxies")
    return figures


async def _fast_path(host: str, port: int) -> list[str]:
    """Names of the cases that were answered wrongly."""
    wrong = []
    for case in CASES:
        seen = await send(host, port, case, "canary")
        good = tuple(answer.status for answer in seen.answers) == case.statuses and seen.closed == case.closes
        if not good or seen.canary is False:
            wrong.append(case.name)
    return wrong


async def _proxied(trial: Trial, fleet: Fleet, victims: int) -> list[str]:
    """Names of the cases after which a client got another's answer."""
    host, _, port = fleet.address.rpartition(":")
    found = []
    async with haproxy(host, int(port), trial.folder) as (proxy, at):
        for case in CASES:
            await send(proxy, at, case, "attacker", 20.0)
            for victim in range(victims):
                if not (await send(proxy, at, _NOTHING, f"victim-{victim}", 20.0)).canary:
                    found.append(case.name)
    return found
