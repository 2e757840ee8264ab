"""Rate limits shared by several routers in Redis.

Queued requests are sent together, one batch at a time, over one connection; the next batch is gathered
meanwhile. Each request is one script, so that no two routers grant the same token. The server's clock is
used. If the server does not respond in time, the router decides by its own counts, which include the server's
grants; a request waits for an unavailable server once, and no other does until it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.ports.clock import Clock
from kvasir.ports.limits import BucketLevels, Grant, LimitRefusal, PerMinute, Quota
from kvasir_platform.gateway.tenants.limit_scripts import ALLOT, BEAT, LEND, SETTLE, TAKE
from kvasir_platform.gateway.tenants.memory_limits import LIMITS, MemoryLimits, check_amount
from kvasir_platform.gateway.tenants.redis_connection import (
    RedisCommand,
    RedisConnection,
    RedisFailure,
    connected,
    deadline,
    exchange,
    where,
)

_log = logging.getLogger(__name__)

_MAX_WAITING = 10_000
_RETRY_S = 1.0
_BEAT_S = 5.0
_CONNECT_S = 2.0
_MICRO = 1e6
_PING = (b"PING",)
_SCRIPTS = (TAKE, SETTLE, BEAT, ALLOT, LEND)
_TAKE, _SETTLE, _BEAT, _ALLOT, _LEND = range(len(_SCRIPTS))


class _Take(NamedTuple):
    """A queued request for a grant."""

    tenant: str
    quota: Quota
    tokens: int
    then: Callable[[Grant | LimitRefusal], None]


class _End(NamedTuple):
    """The end of a grant to report: its change to the charged requests and tokens."""

    tenant: str
    quota: Quota
    requests: int
    tokens: int


class _Ask(NamedTuple):
    """A part that somebody else asks for, with the arguments of its script."""

    tenant: str
    script: int
    arguments: tuple[str | int | float, ...]
    then: Callable[[int], None]


class RedisLimits:
    """The port over Redis. `run` must run: until it has connected, and whenever the connection is lost, the
    router counts by itself. `replica` names this router among those that share the server."""

    def __init__(self, spec: LimitsRedisSpec, clock: Clock, replica: str) -> None:
        self._spec = spec
        self._clock = clock
        self._replica = f"n:{replica}"
        self._local = MemoryLimits(clock.now)
        self._waiting: deque[_Take | _End | _Ask] = deque()
        self._asked: set[str] = set()
        """Tenants reported since the last heartbeat."""
        self._wake = asyncio.Event()
        self._scripts: list[Any] = []
        self._warned = False
        self.shared = False
        """Whether routers count together at the moment."""
        self.local_decisions = 0
        """Requests for a grant that were sent to the server and decided locally."""

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """Ask the server, or decide immediately if it is unavailable."""
        check_amount(quota, tokens)
        asked = _Take(tenant, quota, tokens, then)
        if not self.shared or len(self._waiting) >= _MAX_WAITING:
            self._decide_alone(asked)
            return
        self._waiting.append(asked)
        self._wake.set()

    def settle(self, grant: Grant, tokens: int) -> None:
        """See the port."""
        self._local.settle(grant, tokens)
        self._tell(grant, 0, tokens - grant.tokens)

    def release(self, grant: Grant) -> None:
        """See the port."""
        self._local.release(grant)
        self._tell(grant, -1, -grant.tokens)

    def allot(
        self,
        tenant: str,
        limit: PerMinute,
        per_min: int,
        *,
        wanted: float,
        returned: float,
        then: Callable[[float], None],
    ) -> None:
        """See LendingRateLimits."""
        arguments = self._replica, limit[0], per_min, wanted, returned
        self._ask(_Ask(tenant, _ALLOT, arguments, lambda amount: then(amount / _MICRO)))

    def lend(
        self, tenant: str, most: int, borrower: str, *, wanted: int, running: int, then: Callable[[int], None]
    ) -> None:
        """See LendingRateLimits."""
        self._ask(_Ask(tenant, _LEND, (f"c:{borrower}", most, wanted, running), then))

    def _ask(self, asked: _Ask) -> None:
        if self.shared and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(asked)
            self._wake.set()

    async def run(self) -> None:
        """Maintain the connection, and send queued commands."""
        try:
            while True:
                try:
                    async with connected(self._spec, _CONNECT_S) as connection:
                        await self._serve(connection)
                except (RedisFailure, OSError) as error:
                    self._lost(error)
                await self._clock.sleep(_RETRY_S)
        finally:
            self._fall_back(())

    def _tell(self, grant: Grant, requests: int, tokens: int) -> None:
        if self.shared:
            charged = (requests, tokens) if grant.shared else (0, 0)
            self._waiting.append(_End(grant.tenant, grant.quota, *charged))
            self._wake.set()

    def _decide_alone(self, asked: _Take) -> None:
        self.local_decisions += 1
        asked.then(self._local.decide(asked.tenant, asked.quota, asked.tokens))

    async def _serve(self, connection: RedisConnection) -> None:
        async with deadline(_CONNECT_S):
            scripts = [("SCRIPT", "LOAD", script) for script in _SCRIPTS]
            self._scripts = await exchange(connection, scripts)
            # The server's state of this router may date from before the connection was lost.
            await exchange(connection, self._beats(self._local.tenants()) or [_PING])
        self._found()
        beat_s = self._clock.now() + _BEAT_S
        loop = asyncio.get_running_loop()
        while True:
            timer = loop.call_later(max(0.0, beat_s - self._clock.now()), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            first: list[RedisCommand] = []
            if self._clock.now() >= beat_s:
                beat_s = self._clock.now() + _BEAT_S
                running = {tenant for tenant in self._local.tenants() if self._local.running(tenant)}
                first = self._beats([*(running | self._asked)]) or [_PING]
                self._asked.clear()
            await self._send(connection, first)

    async def _send(self, connection: RedisConnection, first: list[RedisCommand]) -> None:
        batch, self._waiting = self._waiting, deque()
        if not batch and not first:
            return
        try:
            async with deadline(self._spec.timeout_s):
                replies = await exchange(connection, [*first, *map(self._command, batch)])
        except BaseException:
            self._fall_back(batch)
            raise
        for asked, reply in zip(batch, replies[len(first) :], strict=True):
            try:
                if isinstance(asked, _Take):
                    self._answer(asked, reply)
                elif isinstance(asked, _Ask):
                    asked.then(reply)
            # An error of one request must not end the task that serves all others.
            except Exception as error:  # noqa: BLE001
                _log.error("a request failed after its rate limit decision", exc_info=error)

    def _command(self, asked: _Take | _End | _Ask) -> RedisCommand:
        if isinstance(asked, _Ask):
            return ("EVALSHA", self._scripts[asked.script], 1, self._key(asked.tenant), *asked.arguments)
        quota = asked.quota
        self._asked.add(asked.tenant)
        limits = (quota.requests_per_min or 0, quota.tokens_per_min or 0)
        if isinstance(asked, _Take):
            script, rest = self._scripts[_TAKE], (*limits, quota.concurrency or 0, asked.tokens)
        else:
            script, rest = self._scripts[_SETTLE], (*limits, asked.requests, asked.tokens)
        return ("EVALSHA", script, 1, self._key(asked.tenant), self._replica, *rest)

    def _beats(self, tenants: Sequence[str]) -> list[RedisCommand]:
        """The running requests of this router as of before its queued reports."""
        ending = Counter(each.tenant for each in self._waiting if isinstance(each, _End))
        return [
            (
                *("EVALSHA", self._scripts[_BEAT], 1, self._key(tenant), self._replica),
                self._local.running(tenant) + ending[tenant],
            )
            for tenant in tenants
        ]

    def _key(self, tenant: str) -> str:
        return f"{self._spec.namespace}:limits:{tenant}"

    def _answer(self, asked: _Take, reply: list[int]) -> None:
        why, wait, requests, tokens = reply
        levels = BucketLevels(max(0, requests) / _MICRO, max(0, tokens) / _MICRO)
        verdict: Grant | LimitRefusal
        if why:
            verdict = LimitRefusal(LIMITS[why - 1], wait / _MICRO, levels)
        else:
            verdict = Grant(asked.tenant, asked.quota, asked.tokens, levels, shared=True)
            self._local.count(verdict)
        asked.then(verdict)

    def _found(self) -> None:
        self.shared = True
        if self._warned:
            self._warned = False
            _log.warning("rate limits are shared through Redis again", extra={"redis": where(self._spec)})

    def _lost(self, error: Exception) -> None:
        self._fall_back(())
        if not self._warned:
            self._warned = True
            _log.error(
                "rate limits: Redis is unavailable; each router counts alone until it responds",
                extra={"redis": where(self._spec), "reason": str(error) or type(error).__name__},
            )

    def _fall_back(self, batch: Sequence[_Take | _End | _Ask]) -> None:
        """Decide all queued requests locally, beginning with the batch that the server has not answered."""
        self.shared = False
        left, self._waiting = [*batch, *self._waiting], deque()
        for asked in left:
            if isinstance(asked, _Take):
                self._decide_alone(asked)
